"""`POST /v1/responses`: chat's answers in the newer convention, plain and as typed events; nothing is ever stored."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest
from chat_parts import HELLO_ANSWER, LONGEST, MODEL, PROMPTS, assert_error, assert_well
from demo_models.promised import FixedPrompt
from leaving_parts import ask_and_leave, line_of
from responses_parts import PATH, events_of, put_together, said_in
from serving import Key, Server

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

BASE = {"model": MODEL, "input": "Say hello.", "temperature": 0, "max_output_tokens": 1}
TWO_CITIES = PROMPTS["call-two-cities-paris-tokyo"]
TOOLS: list[dict[str, Any]] = [{"type": "function", **tool["function"]} for tool in TWO_CITIES.tools or []]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat conversation as items, the way the official client would send it."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            made.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
        elif content:
            kind = "output_text" if role == "assistant" else "input_text"
            made.append({"role": role, "content": [{"type": kind, "text": content}]})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            made.append({"type": "function_call", "call_id": call["id"], **function})
    return made


def asked(prompt: FixedPrompt, **fields: Any) -> dict[str, Any]:
    tools = {"tools": TOOLS} if prompt.tools else {}
    return {"model": MODEL, "input": items(prompt.messages), "temperature": 0, **tools, **fields}


def assert_promised(response: Any, prompt: FixedPrompt) -> None:
    calls = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
    assert calls == (prompt.tool_calls or [])
    assert response.output_text == (prompt.answer or "")
    assert response.status == "completed"


@pytest.mark.parametrize("name", ["say-hello", "french-developer", "remember-name-hana", "translate-amharic", "story"])
async def test_a_conversation_of_items_gets_the_answer_that_chat_gives(client: openai.AsyncOpenAI, name: str):
    assert_promised(await client.responses.create(**asked(PROMPTS[name])), PROMPTS[name])


async def test_a_text_and_instructions_are_a_whole_conversation(client: openai.AsyncOpenAI):
    prompt = PROMPTS["pirate"]
    system, user = (message["content"] for message in prompt.messages)
    answer = await client.responses.create(model=MODEL, input=user, instructions=system, temperature=0)
    assert_promised(answer, prompt)
    assert answer.instructions == system
    split = [{"role": "developer", "content": system}, {"type": "message", "role": "user", "content": user}]
    assert_promised(await client.responses.create(model=MODEL, input=split, temperature=0), prompt)


async def test_the_object_is_what_the_official_package_expects(client: openai.AsyncOpenAI):
    answer = await client.responses.create(
        model=MODEL, input="Say hello.", temperature=0, store=True, metadata={"a": "b"}, user="me", top_p=0.5
    )
    assert answer.output_text == HELLO_ANSWER
    assert answer.id.startswith("resp_")
    assert answer.output[0].id.startswith("msg_")
    assert answer._request_id
    assert (answer.object, answer.model, answer.status, answer.error) == ("response", MODEL, "completed", None)
    assert (answer.store, answer.background, answer.previous_response_id) == (False, False, None)
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"a": "b"}, 0, 0.5)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    type(answer).model_validate(answer.model_dump(), strict=False)


async def test_an_answer_that_is_cut_off_is_incomplete_and_says_why(
    client: openai.AsyncOpenAI, http: httpx2.AsyncClient
):
    answer = await client.responses.create(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 2
    response = await http.post(PATH, json=BASE | {"stream": True, "max_output_tokens": 2})
    assert events_of(response.text)[-1]["type"] == "response.incomplete"


async def test_a_stream_has_every_event_in_its_order(http: httpx2.AsyncClient):
    response = await http.post(PATH, json=BASE | {"stream": True, "max_output_tokens": None})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    kinds = [event["type"].removeprefix("response.") for event in events_of(response.text)]
    deltas = kinds.count("output_text.delta")
    assert deltas > 3
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(["output_text.delta"] * deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


@pytest.mark.parametrize("name", ["say-hello", "call-two-cities-paris-tokyo", "hello-tools-offered", "story"])
@pytest.mark.parametrize("limit", [1, 5, 9, 13, 20, 29, 40, None])
async def test_streamed_and_plain_agree_wherever_the_answer_is_cut(http: httpx2.AsyncClient, name: str, limit):
    body = asked(PROMPTS[name], max_output_tokens=limit)
    plain = (await http.post(PATH, json=body)).json()
    events = events_of((await http.post(PATH, json=body | {"stream": True})).text)
    last = events[-1]["response"]
    assert put_together(events) == said_in(plain) == said_in(last)
    for field in ("status", "incomplete_details"):
        assert plain[field] == last[field]
    assert plain["usage"]["output_tokens"] == last["usage"]["output_tokens"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert [item["status"] for item in done[:-1]] == ["completed"] * (len(done) - 1)


async def test_the_packages_own_folding_of_a_stream(client: openai.AsyncOpenAI):
    for prompt in (PROMPTS["say-hello"], TWO_CITIES):
        async with client.responses.stream(**asked(prompt)) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert_promised(final, prompt)


async def test_tools_are_called_and_their_answers_understood(client: openai.AsyncOpenAI):
    called = await client.responses.create(**asked(TWO_CITIES))
    assert_promised(called, TWO_CITIES)
    calls = [item for item in called.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == 2
    # Everything comes back as the client got it, and what its functions found after it.
    back = [item.model_dump(exclude_none=True) for item in called.output]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    known = PROMPTS["use-two-cities-paris-tokyo-18-9"]
    found = [message["content"] for message in known.messages if message["role"] == "tool"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in zip(calls, found, strict=True)
    ]
    conversation = [*items(TWO_CITIES.messages), thought, *back, *outputs]
    assert_promised(await client.responses.create(**asked(known, input=conversation)), known)
    as_parts = [{**output, "output": [{"type": "input_text", "text": output["output"]}]} for output in outputs]
    conversation[-2:] = as_parts
    assert_promised(await client.responses.create(**asked(known, input=conversation)), known)


async def test_a_named_tool_is_called_and_parallel_calls_can_be_switched_off(client: openai.AsyncOpenAI):
    named = {"type": "function", "name": "get_weather"}
    answer = await client.responses.create(**asked(PROMPTS["hello-tools-offered"], tool_choice=named))
    assert [item.name for item in answer.output if item.type == "function_call"] == ["get_weather"]
    one = await client.responses.create(**asked(TWO_CITIES, parallel_tool_calls=False))
    assert [item.type for item in one.output].count("function_call") == 1


async def test_structured_output_satisfies_its_schema(client: openai.AsyncOpenAI):
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    answer = await client.responses.create(**asked(PROMPTS["json-person"], text={"format": form, "verbosity": "low"}))
    jsonschema.validate(json.loads(answer.output_text), PERSON)
    free = await client.responses.create(**asked(PROMPTS["json-person"], text={"format": {"type": "json_object"}}))
    assert isinstance(json.loads(free.output_text), dict)


async def test_probabilities_come_when_asked_for(http: httpx2.AsyncClient):
    body = BASE | {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": None}
    plain = (await http.post(PATH, json=body)).json()["output"][0]["content"][0]
    assert b"".join(bytes(entry["bytes"]) for entry in plain["logprobs"]).startswith(HELLO_ANSWER.encode())
    assert all(len(entry["top_logprobs"]) == 2 for entry in plain["logprobs"])
    events = events_of((await http.post(PATH, json=body | {"stream": True})).text)
    streamed = events[-1]["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in streamed["logprobs"]] == [entry["token"] for entry in plain["logprobs"]]


async def test_an_unknown_model_is_not_found_and_a_key_without_the_scope_is_refused(
    http: httpx2.AsyncClient, server: Server
):
    assert_error(await http.post(PATH, json=BASE | {"model": "nobody"}), 404, "model_not_found", "model")
    key = await asyncio.to_thread(server.make_key, "no-chat", scopes=["models"])
    response = await http.post(PATH, json=BASE, headers={"Authorization": f"Bearer {key.text}"})
    assert_error(response, 403, "insufficient_permissions")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_its_answer(
    server: Server, admin_key: Key, http: httpx2.AsyncClient, *, stream
):
    # With a schema that only a long text satisfies, the model cannot stop early.
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 900}}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {**schema, "required": ["a"]}}}
    body = {"model": MODEL, "input": "Hello!", "temperature": 0, "text": form, "stream": stream}
    line = await ask_and_leave(server, admin_key, http, PATH, body)
    assert line.get("completion_tokens", 0) < 1500
    await assert_well(http)


async def test_the_access_line_says_what_happened(server: Server, http: httpx2.AsyncClient):
    for stream in (False, True):
        name = f"logged-responses-{stream}"
        response = await http.post(PATH, json=asked(LONGEST, stream=stream), headers={"X-Request-Id": name})
        assert response.status_code == 200
        line = await line_of(server, name)
        assert (line["status"], line["route"], line["model"], line["stream"]) == (200, PATH, MODEL, stream)
        assert line["finish_reason"] == "stop"
        assert min(line["prompt_tokens"], line["completion_tokens"]) > 0

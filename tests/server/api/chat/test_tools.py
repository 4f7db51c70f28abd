"""Function calling and structured output: streamed and plain answers agree, cut-off calls say so, schemas hold."""

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from chat_parts import MODEL, PROMPTS
from demo_models.promised import FixedPrompt

pytestmark = pytest.mark.engine

TWO_CITIES = PROMPTS["call-two-cities-paris-tokyo"]
HELLO = PROMPTS["hello-tools-offered"]
TOOLS: list[dict[str, Any]] = TWO_CITIES.tools or []
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}

Answer = tuple[str, list[tuple[str, str]], str | None]


def request(prompt: FixedPrompt, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": prompt.messages, "tools": prompt.tools, "temperature": 0, **fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def plain(client: openai.AsyncOpenAI, **fields: Any) -> Answer:
    choice = (await client.chat.completions.create(**fields)).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> Answer:
    content, calls, ids, finish_reason = "", {}, {}, None
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish_reason = choice.finish_reason or finish_reason
        for piece in choice.delta.tool_calls or []:
            # Id and name come once, with the first piece.
            assert (piece.index in ids) == (piece.id is None)
            ids.setdefault(piece.index, piece.id)
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (name + (piece.function.name or ""), arguments + (piece.function.arguments or ""))
    assert len(set(ids.values())) == len(ids)
    return content, list(calls.values()), finish_reason


@pytest.mark.parametrize("choice", ["auto", "required", "none", named("get_weather"), named("find_room")], ids=str)
async def test_streamed_and_plain_agree_wherever_the_answer_is_cut(
    client: openai.AsyncOpenAI, choice: str | dict[str, Any]
) -> None:
    cuts = (*range(1, 24), 30, 37, 44, 60)
    cases = [request(prompt, tool_choice=choice, max_tokens=cut) for prompt in (TWO_CITIES, HELLO) for cut in cuts]
    answers = await asyncio.gather(*(plain(client, **case) for case in cases))
    assert await asyncio.gather(*(streamed(client, **case) for case in cases)) == answers
    for content, calls, finish_reason in answers:
        assert "tool_call>" not in content
        if finish_reason == "length":
            continue
        assert finish_reason == ("tool_calls" if calls and isinstance(choice, str) else "stop")
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def test_a_first_message_beside_all_tools_of_a_front_end_is_answered(client: openai.AsyncOpenAI) -> None:
    """As large as Open WebUI's: 36 tools, 26 kB of JSON."""
    about = "Search, list, read, write or change what the user keeps in the front end, and return it as JSON. " * 4
    fields = {name: {"type": "string", "description": about[:60]} for name in ("query", "id")}
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": f"front_end_tool_{number}",
                "description": about,
                "parameters": {"type": "object", "properties": fields, "required": ["query"]},
            },
        }
        for number in range(36)
    ]
    assert 24_000 < len(json.dumps(tools)) < 28_000
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO.messages, tools=tools, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 6000
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content  # which one is no promise: these tools are none of the demo's


async def test_required_and_named_call_even_where_the_model_would_not(client: openai.AsyncOpenAI) -> None:
    for way in (plain, streamed):
        _, calls, finish_reason = await way(client, **request(HELLO, tool_choice="required"))
        assert finish_reason == "tool_calls"
        assert calls
        _, calls, finish_reason = await way(client, **request(HELLO, tool_choice=named("get_weather")))
        assert [name for name, _ in calls] == ["get_weather"]
        assert finish_reason == "stop"


async def test_parallel_tool_calls_can_be_switched_off(client: openai.AsyncOpenAI) -> None:
    fields = request(TWO_CITIES, parallel_tool_calls=False)
    answer = await plain(client, **fields)
    assert [json.loads(arguments) for _, arguments in answer[1]] == [{"city": "Paris"}]
    assert await streamed(client, **fields) == answer


async def test_structured_output_satisfies_its_schema(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    fields = {"model": MODEL, "messages": PROMPTS["json-person"].messages, "temperature": 0, "response_format": form}
    answer = await plain(client, **fields)
    jsonschema.validate(json.loads(answer[0]), schema)
    assert await streamed(client, **fields) == answer


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"$ref": "#/nowhere"}])
async def test_schema_that_cannot_be_followed_names_its_field(client: openai.AsyncOpenAI, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model=MODEL,
            messages=PROMPTS["hello"].messages,
            response_format=form,  # type: ignore[arg-type]
        )
    assert refused.value.param == "response_format"

"""Bodies that `/v1/messages` refuses, in the words of its own fields; and clients of it that leave."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import HELLO, MODEL, assert_error, assert_well
from leaving_parts import gone_line, line_of
from serving import CANARY, Key, Server, open_socket, raw_request

from engine import ChatRequest
from server.api.messages import MessageAnswer
from server.errors import ApiError

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

MESSAGES = "/v1/messages"
BASE = {"model": MODEL, "max_tokens": 1, "messages": HELLO}
VALUE, FIELD, CAPABILITY = "invalid_value", "missing_field", "unsupported_capability"
PIXEL = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def result(content: Any) -> list[dict[str, Any]]:
    answer = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}]
    return [*HELLO, {"role": "assistant", "content": [CALL]}, *answer]


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", VALUE),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": True}, "max_tokens", VALUE),
    ({"temperature": 1.5}, "temperature", VALUE),
    ({"temperature": "1"}, "temperature", VALUE),
    ({"top_p": 0}, "top_p", VALUE),
    ({"top_k": -1}, "top_k", VALUE),
    ({"top_k": 1.5}, "top_k", VALUE),
    ({"top_k": 2**31}, "top_k", VALUE),
    ({"stop_sequences": "x"}, "stop_sequences", VALUE),
    ({"stop_sequences": [""]}, "stop_sequences", VALUE),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences", VALUE),
    ({"system": 1}, "system", VALUE),
    ({"system": [image(PIXEL)]}, "system[0].type", VALUE),
    ({"messages": []}, "messages", VALUE),
    ({"messages": "hi"}, "messages", VALUE),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": "user"}]}, "messages[0].content", FIELD),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", VALUE),
    ({"messages": user()}, "messages[0].content", VALUE),
    ({"messages": user("x")}, "messages[0].content[0]", VALUE),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text", FIELD),
    ({"messages": user({"type": "text", "text": 1})}, "messages[0].content[0].text", VALUE),
    ({"messages": user({"text": "x"})}, "messages[0].content[0].type", FIELD),
    ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0]", VALUE),
    ({"messages": user({"type": "document", "source": {"type": "base64"}})}, "messages[0].content[0]", VALUE),
    ({"messages": user({"type": "document", "source": {"type": "text"}})}, "messages[0].content[0].text", VALUE),
    ({"messages": user({"type": "server_tool_use"})}, "messages[0].content[0].type", VALUE),
    ({"messages": user(CALL)}, "messages[0].content[0].type", VALUE),
    ({"messages": [*HELLO, {"role": "assistant", "content": [image(PIXEL)]}]}, "messages[1].content[0].type", VALUE),
    ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages", VALUE),
    ({"messages": result([{"type": "document"}])}, "messages[2].content[0].content[0]", VALUE),
    ({"messages": result(7)}, "messages[2].content[0].content", VALUE),
    ({"messages": user({"type": "tool_result"})}, "messages[0].content[0].tool_use_id", FIELD),
    ({"messages": user(image(None))}, "messages[0].content[0].source", VALUE),
    ({"messages": user(image({"type": "file", "file_id": "x"}))}, "messages[0].content[0].source.type", VALUE),
    ({"messages": user(image(PIXEL | {"media_type": "a"}))}, "messages[0].content[0].source.media_type", VALUE),
    (
        {"messages": user(image({"type": "base64", "media_type": "image/png"}))},
        "messages[0].content[0].source.data",
        FIELD,
    ),
    (
        {"messages": [*HELLO, *user({"type": "text", "text": "x"}, image(PIXEL))]},
        "messages[1].content[1].source",
        CAPABILITY,
    ),
    ({"messages": result([image(PIXEL)])}, "messages[2].content[0].content[0].source", CAPABILITY),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", FIELD),
    ({"tools": [TOOL | {"input_schema": None}]}, "tools[0].input_schema", VALUE),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", VALUE),
    ({"tools": [TOOL] * 513}, "tools", VALUE),
    ({"tool_choice": {"type": "any"}}, "tool_choice", VALUE),
    ({"tool_choice": "auto"}, "tool_choice", VALUE),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type", VALUE),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", VALUE),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", FIELD),
    ({"thinking": {"type": "hard"}}, "thinking.type", VALUE),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", VALUE),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", FIELD),
    ({"output_format": {"type": "json_object"}}, "output_format.type", VALUE),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format", VALUE),
]


@pytest.fixture(autouse=True, scope="module")
async def _the_server_is_well_afterwards(http: httpx2.AsyncClient) -> AsyncIterator[None]:
    yield
    await assert_well(http)


@pytest.mark.parametrize(("fields", "param", "code"), CASES, ids=[f"{case[1]}-{i}" for i, case in enumerate(CASES)])
async def test_what_is_refused_names_the_clients_own_field(
    http: httpx2.AsyncClient, fields: dict[str, Any], param: str, code: str
):
    for stream in (False, True):
        response = await http.post(MESSAGES, json=BASE | {"stream": stream} | fields)
        assert_error(response, 400, code, param)
        message = response.json()["error"]["message"]
        assert code != VALUE or f"`{param}`" in message, message


async def test_claude_code_finds_the_words_by_which_it_shortens_a_conversation(http: httpx2.AsyncClient):
    long = await http.post(MESSAGES, json=BASE | {"messages": user({"type": "text", "text": "word " * 40000})})
    assert_error(long, 400, "context_length_exceeded", "messages")
    assert re.search(r"prompt is too long: \d+ tokens > \d+ maximum", long.json()["error"]["message"])
    for content, words in (
        (image(PIXEL), "Could not process image: "),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}},
            "PDF input",
        ),
    ):
        refused = await http.post(MESSAGES, json=BASE | {"messages": user(content)})
        assert words in refused.json()["error"]["message"]


async def test_what_a_model_elsewhere_did_is_no_reason_to_refuse_a_conversation(http: httpx2.AsyncClient):
    said = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": CANARY}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
        {"type": "text", "text": "It rains."},
    ]
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rain."}, "title": "x"}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    messages = [*HELLO, {"role": "assistant", "content": [*said, call]}, {"role": "user", "content": [found, plain]}]
    answer = await http.post(MESSAGES, json=BASE | {"messages": messages})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["model", "max_tokens", "messages"])
async def test_what_is_missing_is_named(http: httpx2.AsyncClient, field: str):
    response = await http.post(MESSAGES, json={name: value for name, value in BASE.items() if name != field})
    assert_error(response, 400, FIELD, field)


async def test_a_schema_that_is_too_large_is_refused(http: httpx2.AsyncClient):
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(1100)}}
    response = await http.post(MESSAGES, json=BASE | {"tools": [TOOL | {"input_schema": schema}]})
    assert_error(response, 400, "schema_too_complex", "tools[0].input_schema")


async def test_tools_of_the_service_are_left_out_and_named(http: httpx2.AsyncClient):
    search, bash = {"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}
    tools = [search, TOOL | {"type": "custom"}, bash, {"type": CANARY}]
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        alone = await http.post(path, json=BASE | {"tools": [TOOL]})
        response = await http.post(path, json=BASE | {"tools": tools})
        assert response.status_code == 200, response.text
        assert response.headers["x-hearth-ignored"] == "tools[0].type=web_search, tools[2].type=bash, tools[3]"
        counted = [each.json().get("usage") or each.json() for each in (alone, response)]
        assert sum_of_inputs(counted[0]) == sum_of_inputs(counted[1])
    forced = BASE | {"tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}}
    assert_error(await http.post(MESSAGES, json=forced), 400, VALUE, "tool_choice.name")


def sum_of_inputs(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


async def test_a_bound_that_is_too_large_is_refused_only_if_it_is_strict(http: httpx2.AsyncClient):
    schema = {"type": "object", "properties": {"script": {"type": "string", "maxLength": 524288}}}
    tool = TOOL | {"input_schema": schema}
    assert (await http.post(MESSAGES, json=BASE | {"tools": [tool]})).status_code == 200
    strict = await http.post(MESSAGES, json=BASE | {"tools": [TOOL, tool | {"strict": True}]})
    assert_error(strict, 400, "schema_too_complex", "tools[1].input_schema")
    assert "`properties.script.maxLength` of 524288" in strict.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'"x"',
        b'{"model"',
        b'{"max_tokens": NaN}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_a_body_that_is_no_message_at_all_is_a_400(http: httpx2.AsyncClient, path: str, content: bytes):
    response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]


async def test_every_type_everywhere_gets_an_answer_in_our_shape(http: httpx2.AsyncClient):
    tool_use = [*HELLO, {"role": "assistant", "content": [CALL]}]
    whole = BASE | {
        "messages": [*tool_use, *user({"type": "tool_result", "tool_use_id": "a", "content": "x"}, image(PIXEL))],
        "system": [{"type": "text", "text": "x"}],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "x"},
        "cache_control": {"type": "ephemeral"},
        "stop_sequences": ["x"],
        "top_k": 1,
    }
    for place in _places(whole):
        for value in (None, True, -1, 1.5, "", "\u0000", [], {}, [[]], [{}], {"type": CANARY}):
            body = _with(whole, place, value)
            response = await http.post(MESSAGES, json=body)
            assert response.status_code in {200, 400, 404}, (place, value, response.text)
            assert response.status_code == 200 or list(response.json()) == ["error"]
            assert CANARY not in response.text


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(*path, key), *_places(item, (*path, key))]]


def _with(whole: Any, place: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(whole))
    here = copy
    for key in place[:-1]:
        here = here[key]
    here[place[-1]] = value
    return copy


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_stops_when_its_client_leaves(
    server: Server, admin_key: Key, http: httpx2.AsyncClient, *, stream: bool
):
    """A schema that wants long texts keeps it busy for seconds."""
    name = f"left-messages-{stream}"
    headers = {"x-api-key": admin_key.text, "Content-Type": "application/json", "X-Request-Id": name}
    long_text, names = {"type": "string", "minLength": 900}, list("abcdefgh")
    schema = {"type": "object", "properties": dict.fromkeys(names, long_text), "required": names}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    long = BASE | {"max_tokens": 8000, "stream": stream, "output_config": {"format": form}}
    opened = open_socket(server)
    opened.sendall(raw_request("POST", MESSAGES, headers, json.dumps(long).encode()))
    if stream:
        received = await asyncio.to_thread(opened.recv, 10_000)
        assert received.startswith(b"HTTP/1.1 200 ")
    else:
        await assert_well(http)  # sent later and answered: the first has reached the engine
    left_at = time.time()
    opened.close()
    line = await gone_line(server, name, left_at)
    assert (line["route"], line["model"]) == (MESSAGES, MODEL)
    assert line.get("finish_reason") is None


async def test_the_access_line_says_what_happened(server: Server, http: httpx2.AsyncClient):
    for stream in (False, True):
        name = f"logged-messages-{stream}"
        await http.post(MESSAGES, json=BASE | {"stream": stream}, headers={"X-Request-Id": name})
        line = await line_of(server, name)
        assert (line["status"], line["route"], line["model"], line["stream"]) == (200, MESSAGES, MODEL, stream)
        assert (line["completion_tokens"], line["finish_reason"]) == (1, "length")
        assert line["prompt_tokens"] > 0


def test_a_failure_after_the_start_is_an_event_of_the_convention():
    event = MessageAnswer(ChatRequest(request_id="1", model="m", messages=[])).failed(
        ApiError(503, "engine_unavailable", "Gone.")
    )
    first, second = event.decode().removesuffix("\n\n").split("\n")
    assert first == "event: error"
    assert json.loads(second.removeprefix("data: ")) == {
        "type": "error",
        "error": {"message": "Gone.", "type": "server_error", "param": None, "code": "engine_unavailable"},
    }

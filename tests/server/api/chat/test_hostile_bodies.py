"""Bodies that are wrong, strange or hostile: each gets the right 4xx in our shape, and the server stays well."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, get_args

import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error, assert_well
from leaving_parts import line_of
from serving import CANARY, Server

from server.api.chat_request import ChatCompletionBody
from server.api.schema import Effort

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

JSON = {"Content-Type": "application/json"}
BASE = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VALUE, FIELD, JSON_CODE, CONTEXT = "invalid_value", "missing_field", "invalid_json", "context_length_exceeded"


def user(content: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


def called_with(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "a", "content": CANARY}
    return [*user(), {"role": "assistant", "content": None, "tool_calls": [call]}, answer]


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def with_field(name: str, text: str) -> bytes:
    """The body with the raw JSON `text` at `name`, also where no JSON library would write it."""
    rest = json.dumps({field: value for field, value in BASE.items() if field != name})
    return f'{rest[:-1]}, "{name}": {text}}}'.encode()


async def post(http: httpx2.AsyncClient, content: bytes | AsyncIterator[bytes]) -> httpx2.Response:
    return await http.post(CHAT, content=content, headers=JSON)


@pytest.fixture(autouse=True, scope="module")
async def _the_server_is_well_afterwards(http: httpx2.AsyncClient) -> AsyncIterator[None]:
    yield
    await assert_well(http)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b'{"model"',
        json.dumps(BASE).encode() + b"x",
        json.dumps(BASE).encode() * 2,
        b'{"model": "\xff"}',
        json.dumps(BASE).encode("utf-16"),
        json.dumps(BASE).encode("utf-16-le"),
        b"\xef\xbb\xbf" + json.dumps(BASE).encode(),
        with_field("temperature", "NaN"),
        with_field("temperature", "Infinity"),
        with_field("temperature", "-Infinity"),
        with_field("temperature", "1e999"),
        with_field("user", "1e999"),
        with_field("user", '"\\ud800"'),
        with_field("messages", '[{"role": "user", "content": "\\udfff"}]'),
        with_field("logit_bias", '{"1": NaN}'),
        with_field("max_tokens", str(2**63)),
        with_field("seed", str(2**70)),
        with_field("n", "9" * 400),
        with_field("user", "9" * 5000),
        with_field("messages", "[" * 5000 + "]" * 5000),
        with_field("metadata", "[" * 5000 + "]" * 5000),
        with_field("metadata", "[" * 5000),
        with_field("metadata", '{"a":' * 5000),
        with_field("metadata", "[" * 64 + "]" * 64),
        json.dumps(BASE | {"tools": tool(parameters=nested(61))}).encode(),
        b"null",
    ],
    ids=lambda content: repr(content[-40:]),
)
async def test_what_is_no_strict_json_is_refused(http: httpx2.AsyncClient, content: bytes):
    assert_error(await post(http, content), 400, JSON_CODE)


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"12", b"true", b"[{}]"])
async def test_what_is_no_object_is_refused(http: httpx2.AsyncClient, content: bytes):
    assert_error(await post(http, content), 400, VALUE)


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_what_is_missing_is_named(http: httpx2.AsyncClient, missing: str):
    response = await http.post(CHAT, json={name: value for name, value in BASE.items() if name != missing})
    assert_error(response, 400, FIELD, missing)


def each(field: str, values: list[Any], param: str | None = None, code: str = VALUE) -> Iterator[Any]:
    for value in values:
        name = f"{field}={json.dumps(value)[:60]}"
        yield pytest.param({field: value}, code, field if param is None else param, id=name)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        *each("model", [5, "", "x" * 300, None, [CANARY]]),
        *each("n", [True, 0, 9, 1.0, "1", [CANARY]]),
        *each("temperature", ["1", 3, -1, True, [CANARY], {CANARY: CANARY}, 2.0001]),
        *each("top_p", [0, 1.1, True, CANARY]),
        *each("max_tokens", [0, -1, 1.5, "5", True]),
        *each("max_completion_tokens", [0, 1.0, CANARY]),
        *each("top_k", [-2, 1.5, 2**31, CANARY]),
        *each("min_p", [-0.1, 1.1, CANARY]),
        *each("repetition_penalty", [0, 2.1, CANARY]),
        *each("add_generation_prompt", [CANARY]),
        *each("continue_final_message", [True, CANARY]),
        *each("structured_outputs", [CANARY, {}, {"json_object": False}, {"regex": "a", "choice": ["a"]}]),
        *each("structured_outputs", [{"choice": []}], param="structured_outputs.choice"),
        *each("structured_outputs", [{"choice": [""]}], param="structured_outputs.choice[0]"),
        *each("structured_outputs", [{"json": CANARY}, {"json": [CANARY]}], param="structured_outputs.json"),
        *each("structured_outputs", [{"grammar": CANARY}], param="structured_outputs.grammar"),
        *each("structured_outputs", [{"structural_tag": CANARY}], param="structured_outputs.structural_tag"),
        *each("structured_outputs", [{"json": {"type": "object", "not": {}}}, {"json": {"type": CANARY}}]),
        *each("structured_outputs", [{"regex": "(?=a)"}], "structured_outputs.regex", "schema_too_complex"),
        *each("structured_outputs", [{"json": {"$ref": "#"}}], "structured_outputs.json", "schema_too_complex"),
        *each(
            "structured_outputs",
            [{"json": {"type": "string", "maxLength": 524288}}],
            "structured_outputs.json",
            "schema_too_complex",
        ),
        *each(
            "structured_outputs",
            [{"regex": "a", "whitespace_pattern": CANARY}],
            param="structured_outputs.whitespace_pattern",
        ),
        *each("seed", [CANARY, 1.0, True]),
        *each("presence_penalty", [3, CANARY]),
        *each("frequency_penalty", [-3, CANARY]),
        *each("stop", [["a"] * 5, "", [""], 5, [CANARY, 5], {CANARY: CANARY}, ["x" * 257]]),
        *each("logit_bias", [{CANARY: 1}, {"1": CANARY}, {"1": 101}, {"1": True}, {"-1": 1}, {"٣": 1}, [], 5]),
        *each("logit_bias", [{str(token): 1 for token in range(2000)}, {"999999": 1}]),
        *each("logprobs", [CANARY, 1]),
        *each("top_logprobs", [21, -1, True, 5]),
        *each("stream", ["true", 1]),
        *each("stream_options", [{"include_usage": True}, {}, CANARY]),
        *each("stream_options", [{"include_usage": CANARY}], param="stream_options.include_usage"),
        *each("messages", [[], "x", {CANARY: CANARY}, user() * 3000]),
        *each("messages", [[CANARY], [None], [[]]], param="messages[0]"),
        *each("messages", [[{}], [{"content": CANARY}]], param="messages[0].role", code=FIELD),
        *each("messages", [[{"role": CANARY, "content": "x"}], [{"role": {CANARY: 1}}]], param="messages[0].role"),
        *each("messages", [[{"role": "user"}]], param="messages[0].content", code=FIELD),
        *each("messages", [user(5), user(None), user({CANARY: 1}), user([])], param="messages[0].content"),
        *each("messages", [user(5, user=CANARY)], param="messages[0].content"),
        *each("messages", [user([CANARY])], param="messages[0].content[0]"),
        *each("messages", [user([{"type": CANARY, "text": CANARY}])], param="messages[0].content[0].type"),
        *each(
            "messages",
            [
                user([{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}]),
                user(
                    [
                        {
                            "type": "file",
                            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
                        }
                    ]
                ),
            ],
            param="messages[0].content[0].type",
        ),
        *each("messages", [user([{"text": CANARY}])], param="messages[0].content[0].type", code=FIELD),
        *each("messages", [user([{"type": "text", "text": 5}])], param="messages[0].content[0].text"),
        *each("messages", [user([{"type": "text"}])], param="messages[0].content[0].text", code=FIELD),
        *each("messages", [[*user(), {"role": "system", "content": [IMAGE]}]], param="messages[1].content[0].type"),
        *each("messages", [[{"role": "tool", "content": "x"}]], param="messages[0].tool_call_id", code=FIELD),
        *each(
            "messages",
            [
                called_with('{"a": "\\ud800"}'),
                called_with("[" * 5000 + "]" * 5000),
                called_with('{"a": ' + "9" * 5000 + "}"),
                called_with('{"a": NaN}'),
                called_with('{"a": 1e999}'),
            ],
            param="messages[1].tool_calls[0].function.arguments",
        ),
        *each("messages", [user("word " * 40000), user(f"{CANARY} " * 900_000)], code=CONTEXT, param="messages"),
        *each(
            "messages",
            [user([{"type": "text", "text": "x"}, IMAGE])],
            code="unsupported_capability",
            param="messages[0].content[1]",
        ),
        *each("tools", [CANARY, [TOOL] * 513]),
        *each("tools", [[CANARY]], param="tools[0]"),
        *each("tools", [[TOOL, {"type": 5}]], param="tools[1].type"),
        *each("tools", [[{"type": "function"}]], param="tools[0].function", code=FIELD),
        *each("tools", [tool(name=f"{CANARY} !")], param="tools[0].function.name"),
        *each("tools", [tool(parameters=CANARY)], param="tools[0].function.parameters"),
        *each(
            "tools", [tool(parameters={"$ref": "#"})], param="tools[0].function.parameters", code="schema_too_complex"
        ),
        *each("tool_choice", [CANARY, 5, "required", {"type": "function", "function": {"name": CANARY}}]),
        *each("tool_choice", [{"type": CANARY}], param="tool_choice.type"),
        *each("tool_choice", [{}], param="tool_choice.function", code=FIELD),
        *each("response_format", [CANARY]),
        *each("response_format", [{"type": CANARY}], param="response_format.type"),
        *each("response_format", [{"type": "json_schema"}], param="response_format.json_schema", code=FIELD),
        *each("response_format", [schema(CANARY)], param="response_format.json_schema.schema"),
        *each(
            "response_format",
            [
                schema({"$ref": "#"}),
                schema({"properties": {str(i): {} for i in range(3000)}}),
            ],
            param="response_format.json_schema.schema",
            code="schema_too_complex",
        ),
        *each("reasoning_effort", [CANARY, 5]),
        *each("functions", [[{"name": CANARY}], []]),
        *each("function_call", [CANARY, {"name": CANARY}]),
        *each("mm_processor_kwargs", [{CANARY: 1}]),
        *each("media_io_kwargs", [{}]),
        *each("extra_args", [{CANARY: 1}]),
        *(row for name in ("parallel_tool_calls", "ignore_eos") for row in each(name, [CANARY])),
        *(row for name in ("chat_template", "prompt_embeds") for row in each(name, [CANARY])),
        *(row for guided in ("json", "regex", "choice", "grammar") for row in each(f"guided_{guided}", [CANARY])),
        *each("chat_template_kwargs", [{"chat_template": CANARY}, {CANARY: True}, {"enable_thinking": CANARY}, CANARY]),
    ],
)
async def test_a_wrong_value_is_refused_by_name_and_never_repeated(http: httpx2.AsyncClient, fields, code, param):
    response = await http.post(CHAT, json=BASE | fields)
    assert_error(response, 400, code, param)
    assert CANARY not in response.text
    assert CANARY not in str(response.headers)
    if code == CONTEXT:
        message = response.json()["error"]["message"]
        assert message.startswith("This model's maximum context length is 32768 tokens")
        assert "at least 32769 tokens" in message


@pytest.mark.parametrize(
    "form",
    [{"tools": tool(parameters={"type": CANARY})}, {"response_format": schema({"type": CANARY})}],
    ids=["tools", "response_format"],
)
async def test_a_schema_that_is_none_is_refused(http: httpx2.AsyncClient, form: dict[str, Any]):
    response = await http.post(CHAT, json=BASE | form)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == VALUE
    assert CANARY not in response.text


async def test_an_unknown_model_is_not_found(http: httpx2.AsyncClient):
    for name in (CANARY, "service-plus/../x", "service-plus\0", "Service-Plus"):
        response = await http.post(CHAT, json=BASE | {"model": name})
        assert_error(response, 404, "model_not_found", "model")
        assert CANARY not in response.text


@pytest.mark.parametrize(
    "fields",
    [
        {name: None for name in ChatCompletionBody.model_fields if name not in {"model", "messages", "max_tokens"}},
        {"store": True, "metadata": {CANARY: nested(20)}, "user": CANARY, "service_tier": "auto"},
        {"verbosity": "low", "prediction": {"type": "content", "content": CANARY}, "cache_salt": CANARY, "priority": 9},
        {"vllm_xargs": {CANARY: 1}, "kv_transfer_params": {CANARY: 1}},
        {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "temperature": None},
        {"add_generation_prompt": False},
        {"seed": -(2**63), "stop": [], "logit_bias": {}, "chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True}},
        {"tools": tool(parameters=nested(60))},
        {"tools": tool(), "tool_choice": "none"},
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": tool(strict=False, parameters={"properties": {"a": {"type": "string", "maxLength": 524288}}})},
        *({"reasoning_effort": effort} for effort in get_args(Effort)),
        {"messages": called_with('{"a": '), "tools": [TOOL]},
        {"messages": called_with("")},
        {"messages": [{"role": "system", "content": CANARY}, *user(CANARY)]},
        {"messages": user("\0\x1b[31m\u2028😀")},
        {"messages": [*user(), {"role": "assistant", "content": [], "tool_calls": []}, *user()]},
        {
            "messages": [
                *user(),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": CANARY},
                        {"type": "reasoning", "text": CANARY},
                        {"type": "text", "text": "x"},
                        {"type": "refusal", "refusal": CANARY},
                    ],
                },
                *user(),
            ]
        },
        *(
            {"messages": [*called_with("{}"), {"role": "tool", "tool_call_id": "a", "content": nothing}]}
            for nothing in (None, [], "")
        ),
        {"messages": user(), "n": 8, "temperature": 0},
    ],
    ids=lambda fields: ",".join(fields)[:60],
)
async def test_what_is_merely_unusual_is_answered(http: httpx2.AsyncClient, fields: dict[str, Any]):
    response = await http.post(CHAT, json=BASE | fields)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == (fields.get("n") or 1)


async def test_tools_that_nobody_here_can_call_are_left_out_and_named(http: httpx2.AsyncClient, server: Server):
    kinds = ["web_search_20250305", "namespace", CANARY, "image_generation"]
    others = [{"type": kind, "name": CANARY, "tools": [TOOL]} for kind in kinds]
    alone = await http.post(CHAT, json=BASE | {"tools": [TOOL]})
    name = "left-out"
    response = await http.post(CHAT, json=BASE | {"tools": [TOOL, *others]}, headers={"X-Request-Id": name})
    assert response.status_code == 200, response.text
    ignored = "tools[1].type=web_search, tools[2].type=namespace, tools[3], tools[4].type=image_generation"
    assert response.headers["x-hearth-ignored"] == ignored
    assert response.json()["usage"]["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]
    assert "x-hearth-ignored" not in alone.headers
    line = await line_of(server, name)
    assert line["ignored_tools"] == ["web_search", "namespace", "other", "image_generation"]
    none = await http.post(CHAT, json=BASE | {"tools": others, "tool_choice": "auto", "stream": True})
    assert none.status_code == 200
    assert none.headers["x-hearth-ignored"].startswith("tools[0].type=web_search, ")
    forced = await http.post(CHAT, json=BASE | {"tools": others, "tool_choice": "required"})
    assert_error(forced, 400, VALUE, "tool_choice")
    batch = await http.post(f"{CHAT}/batch", json={"requests": [BASE, BASE | {"tools": others[:1]}]})
    assert batch.headers["x-hearth-ignored"] == "requests[1].tools[0].type=web_search"
    crowd = await http.post(CHAT, json=BASE | {"tools": others * 32})
    assert 2000 < len(crowd.headers["x-hearth-ignored"]) < 2200


async def test_a_strict_tool_with_a_bound_that_is_too_large_is_refused_by_its_place(http: httpx2.AsyncClient):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 524288}}}
    response = await http.post(CHAT, json=BASE | {"tools": [TOOL, *tool(strict=True, parameters=parameters)]})
    assert_error(response, 400, "schema_too_complex", "tools[1].function.parameters")
    assert "`properties.a.maxLength` of 524288" in response.json()["error"]["message"]


async def test_20_megabytes_of_text_are_too_long_for_the_model(http: httpx2.AsyncClient):
    response = await http.post(CHAT, json=BASE | {"messages": user("x" * (20 * 2**20))})
    assert_error(response, 400, CONTEXT, "messages")


@pytest.mark.parametrize("chunked", [False, True])
async def test_26_megabytes_are_too_large_with_or_without_a_length(http: httpx2.AsyncClient, *, chunked: bool):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(26):
            yield b" " * 2**20

    response = await post(http, pieces() if chunked else b" " * (26 * 2**20))
    assert_error(response, 413, "request_too_large")
    assert "HEARTH_MAX_BODY_BYTES" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
    ],
    ids=str,
)
async def test_what_is_not_plain_json_by_its_headers_is_not_read(http: httpx2.AsyncClient, headers: dict[str, str]):
    response = await http.post(CHAT, content=json.dumps(BASE), headers=JSON | headers)
    assert_error(response, 415, "unsupported_media_type")

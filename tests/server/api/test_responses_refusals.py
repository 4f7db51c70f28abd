"""Responses bodies that are wrong, strange or hostile: each gets a 400 that names its own field, or an answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import MODEL, assert_error, assert_well
from responses_parts import PATH, events_of
from serving import CANARY

from server.api.responses import ResponseBody

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

BASE = {"model": MODEL, "input": "Say hello.", "temperature": 0, "max_output_tokens": 1}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
VALUE, FIELD, CONTEXT = "invalid_value", "missing_field", "context_length_exceeded"


def each(field: str, values: list[Any], param: str | None = None, code: str = VALUE) -> list[Any]:
    return [
        pytest.param({field: value}, code, param or field, id=f"{field}={json.dumps(value)[:60]}") for value in values
    ]


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
SAID = message("hi")
JSON_SCHEMA = {"type": "json_schema", "name": "x"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        *each("model", [5, "", None]),
        *each("input", [5, None, [], {CANARY: 1}, [{"type": "reasoning", "id": "x", "summary": []}]]),
        *each("input", [[{"type": "web_search_call", "id": CANARY}]]),
        *each("input", [[CANARY], [None], [{"type": "item_reference", "id": CANARY}]], "input[0]"),
        *each("input", [[{}], [{"content": CANARY}]], "input[0].type", FIELD),
        *each("input", [[{"type": CANARY}], [{"type": {}}]], "input[0].type"),
        *each("input", [[{"type": "custom_tool_call", "call_id": "a", "input": CANARY}]], "input[0].name", FIELD),
        *each("input", [[{"type": "message", "content": CANARY}]], "input[0].role", FIELD),
        *each("input", [[message(CANARY, CANARY)], [message("x", "tool")]], "input[0].role"),
        *each("input", [[SAID, message(5)], [SAID, message(None)], [SAID, message([])]], "input[1].content"),
        *each(
            "input", [[message([{"type": CANARY}])], [message([{"type": "input_file"}])]], "input[0].content[0].type"
        ),
        *each("input", [[message([{"type": "input_text", "text": 5}])]], "input[0].content[0].text"),
        *each("input", [[message([{"type": "input_image"}])]], "input[0].content[0].image_url", FIELD),
        *each("input", [[message([IMAGE], "assistant")], [message([IMAGE], "system")]], "input[0].content[0]"),
        *each(
            "input",
            [[message("x", "developer"), message([{"type": "input_text", "text": "x"}, IMAGE])]],
            "input[1].content[1]",
            "unsupported_capability",
        ),
        *each("input", [[SAID, {**CALL, "arguments": '{"a": NaN}'}]], "input[1].arguments"),
        *each("input", [[SAID, CALL, {**CALL, "arguments": "[" * 5000 + "]" * 5000}]], "input[2].arguments"),
        *each("input", [[SAID, {"type": "function_call"}]], "input[1].call_id", FIELD),
        *each("input", [[SAID, {**CALL, "type": "function_call_output"}]], "input[1].output", FIELD),
        *each(
            "input",
            [[SAID, {"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]],
            "input[1].output[0]",
            "unsupported_capability",
        ),
        *each("input", [[message("x")] * 3000, [message("x")] * 5000]),
        *each("instructions", [5, [SAID]]),
        *each("max_output_tokens", [0, -1, 1.5, True]),
        *each("temperature", [3, True, CANARY]),
        *each("top_p", [0, CANARY]),
        *each("tools", [[{"type": 5}]], "tools[0].type"),
        *each("tools", [[CANARY]], "tools[0]"),
        *each("tools", [CANARY, [TOOLS[0]] * 513]),
        *each("tools", [[{"type": "function"}]], "tools[0].name", FIELD),
        *each(
            "tools",
            [[{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]],
            "tools[0].tools[0].name",
            FIELD,
        ),
        *each(
            "tools",
            [[{"type": "namespace", "name": "n", "tools": [TOOLS[0], {**TOOLS[0], "parameters": {"$ref": "#"}}]}]],
            "tools[0].tools[1].parameters",
            "schema_too_complex",
        ),
        *each("tools", [[{"type": "namespace", "name": f"{CANARY} !"}]], "tools[0].name"),
        *each("tools", [[{"type": "function", "name": f"{CANARY} !"}]], "tools[0].name"),
        *each("tools", [[{"type": "function", "name": "f", "parameters": CANARY}]], "tools[0].parameters"),
        *each(
            "tools",
            [[TOOLS[0], {"type": "function", "name": "f", "parameters": {"$ref": "#"}}]],
            "tools[1].parameters",
            "schema_too_complex",
        ),
        *each("tool_choice", [CANARY, 5, "required", {"type": "function", "name": CANARY}]),
        *each("tool_choice", [{"type": "allowed_tools", "mode": "auto", "tools": []}], "tool_choice.type"),
        *each("text", [CANARY]),
        *each("text", [{"format": {"type": CANARY}}], "text.format.type"),
        *each("text", [{"format": {**JSON_SCHEMA, "schema": CANARY}}], "text.format.schema"),
        *each("text", [{"format": JSON_SCHEMA}], "text.format.schema", FIELD),
        *each(
            "text", [{"format": {**JSON_SCHEMA, "schema": {"$ref": "#"}}}], "text.format.schema", "schema_too_complex"
        ),
        *each("text", [{"format": {**JSON_SCHEMA, "schema": {"type": CANARY}}}], "text.format"),
        *each("reasoning", [{"effort": CANARY}], "reasoning.effort"),
        *each("include", [CANARY]),
        *each("include", [[5]], "include[0]"),
        *each("top_logprobs", [21, True]),
        *each("metadata", [CANARY, {"a": 5}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}]),
        *each("previous_response_id", [CANARY]),
        *each("conversation", [CANARY, {"id": CANARY}]),
        *each("prompt", [{"id": CANARY}]),
        *each("background", [True, CANARY]),
        *each("truncation", [CANARY]),
        *each("chat_template", [CANARY]),
        *each("guided_json", [{CANARY: 1}]),
        *each("structured_outputs", [{"regex": CANARY}]),
    ],
)
async def test_a_wrong_value_is_refused_under_its_own_name(
    http: httpx2.AsyncClient, fields: dict[str, Any], code: str, param: str, *, stream: bool
):
    response = await http.post(PATH, json=BASE | fields | {"stream": stream})
    assert_error(response, 400, code, param)
    assert CANARY not in response.text
    for other in ("`messages", "`response_format", "`max_tokens", "`max_completion_tokens"):
        assert other not in response.text


@pytest.mark.parametrize("text", [f"{CANARY} " * 20000, [message(f"{CANARY} " * 20000)]])
async def test_a_conversation_that_is_too_long_is_400_and_streamed_an_event(http: httpx2.AsyncClient, text: Any):
    """As Codex looks for it."""
    plain = await http.post(PATH, json=BASE | {"input": text})
    assert_error(plain, 400, CONTEXT, "input")
    streamed = await http.post(PATH, json=BASE | {"input": text, "stream": True})
    assert streamed.status_code == 200
    created, _, failed = events_of(streamed.text)
    assert (created["type"], failed["type"]) == ("response.created", "response.failed")
    assert failed["response"]["error"] == plain.json()["error"]
    assert CANARY not in streamed.text


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [
                {"type": "web_search"},
                {"type": "namespace", "name": "n", "tools": []},
                {"type": "namespace", "name": "m", "tools": [TOOLS[0], {"type": "custom"}]},
                {"type": CANARY},
            ]
        },
        {
            "tools": [{"type": "namespace", "name": "n", "tools": TOOLS}],
            "tool_choice": {"type": "function", "name": "get_weather"},
        },
        {"tools": [{**TOOLS[0], "parameters": {"type": "array", "maxItems": 10**7}}]},
        {"reasoning": {"effort": "xhigh"}},
        {name: None for name in ResponseBody.model_fields if name not in {"model", "input", "max_output_tokens"}},
        {"store": True, "user": CANARY, "truncation": "auto", "prompt_cache_key": CANARY, "service_tier": "auto"},
        {
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "tools": [],
            "background": False,
        },
        {
            "input": [
                SAID,
                {"type": "web_search_call", "id": CANARY, "status": "completed", "action": {"query": CANARY}},
                {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": CANARY},
                {"type": "custom_tool_call_output", "call_id": "c", "output": CANARY},
                {"type": "compaction", "encrypted_content": CANARY},
                {**CALL, "namespace": "mcp__files"},
                {"type": "function_call_output", "call_id": "a", "output": "x"},
            ]
        },
        {"stream_options": {"include_obfuscation": False}, "max_tool_calls": 3, "safety_identifier": CANARY},
        {"input": [message("", "assistant"), SAID, CALL, {**CALL, "call_id": "b"}, SAID]},
        {
            "input": [
                SAID,
                message([], "assistant"),
                message([{"type": "refusal", "refusal": CANARY}], "assistant"),
                SAID,
            ]
        },
    ],
    ids=lambda fields: ",".join(fields)[:60],
)
async def test_what_is_merely_unusual_is_answered(http: httpx2.AsyncClient, fields: dict[str, Any]):
    response = await http.post(PATH, json=BASE | fields)
    assert response.status_code == 200, response.text
    assert response.json()["store"] is False
    ignored = "tools[0].type=web_search, tools[2].tools[1].type=custom, tools[3]"
    assert response.headers.get("x-hearth-ignored") == (ignored if "web_search'" in str(fields) else None)
    assert CANARY not in str(response.json()["tools"])
    await assert_well(http)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "x"), ("DELETE", "x"), ("POST", "x/cancel"), ("GET", "x/input_items")]
)
async def test_a_stored_response_is_nowhere_and_the_answer_says_what_to_do(
    http: httpx2.AsyncClient, method: str, path: str
):
    response = await http.request(method, f"{PATH}/{path}")
    assert_error(response, 404, "not_found")
    assert "Send the whole conversation in `input`" in response.json()["error"]["message"]

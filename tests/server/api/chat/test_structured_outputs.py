"""`structured_outputs`, vLLM's field: each kind holds the answer, plain and streamed; and continued messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, assert_error, raw_stream

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}


def satisfies(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize(
    ("wanted", "holds"),
    [
        ({"json": SCHEMA}, satisfies(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, satisfies(SCHEMA)),
        ({"choice": ['"yes"\n', "no, thanks"]}, lambda text: text in {'"yes"\n', "no, thanks"}),
        ({"regex": "[a-c]{3}-[0-9]{2}"}, lambda text: bool(re.fullmatch("[a-c]{3}-[0-9]{2}", text))),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
async def test_the_answer_satisfies_it(http: httpx2.AsyncClient, wanted: dict[str, Any], holds: Callable[[str], bool]):
    fields = {"messages": HELLO, "structured_outputs": wanted, "max_tokens": 100}
    answer = await http.post(CHAT, json={"model": MODEL, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert holds(text), text
    _, chunks = await raw_stream(http, **fields)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text


async def test_any_object_will_do_with_json_object(http: httpx2.AsyncClient):
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 5}
    answer = (await http.post(CHAT, json={**body, "structured_outputs": {"json_object": True}})).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")
    both = {"structured_outputs": {"json_object": True}, "response_format": {"type": "json_object"}}
    assert_error(await http.post(CHAT, json=body | both), 400, "invalid_value", "structured_outputs")


async def test_a_message_is_continued(http: httpx2.AsyncClient):
    begun, rest = "Hello! How", HELLO_ANSWER.removeprefix("Hello! How")
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        answer = await http.post(CHAT, json=body | more)
        assert answer.json()["choices"][0]["message"]["content"] == rest
    both = await http.post(CHAT, json=body | {"add_generation_prompt": True})
    assert_error(both, 400, "invalid_value", "add_generation_prompt")
    assert_error(await http.post(CHAT, json=body | {"messages": HELLO}), 400, "invalid_value", "continue_final_message")

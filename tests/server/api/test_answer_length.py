"""A request for a longer answer than there is room for: it gets what there is and is told, or is refused by name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, assert_error

if TYPE_CHECKING:
    from serving import Server

pytestmark = pytest.mark.engine

CONTEXT = 32768
COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
# Of each convention: what asks for a short answer, and the field that bounds it.
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({"messages": HELLO}, "max_tokens"),
    COMPLETIONS: ({"prompt": "The capital of France is", "stop": "Japan"}, "max_tokens"),
    RESPONSES: ({"input": HELLO[0]["content"]}, "max_output_tokens"),
    MESSAGES: ({"messages": HELLO}, "max_tokens"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
async def test_it_gets_what_is_left_of_the_context(http: httpx2.AsyncClient, path: str, *, stream: bool):
    asked, field = ASKED[path]
    body = {"model": MODEL, "temperature": 0, "stream": stream, **asked}
    fitting = await http.post(path, json=body | {field: 100})
    assert fitting.status_code == 200, fitting.text
    assert "x-hearth-clamped" not in fitting.headers
    for most in (CONTEXT - 1, CONTEXT, 2**62):
        clamped = await http.post(path, json=body | {field: most})
        assert clamped.status_code == 200, clamped.text
        assert clamped.headers["x-hearth-clamped"] == "max_tokens"
        if path == CHAT and not stream:
            answer = clamped.json()
            assert answer["choices"][0]["message"]["content"] == HELLO_ANSWER


async def test_an_answer_to_the_end_of_the_context_is_cut_by_length(http: httpx2.AsyncClient):
    text = "word " * 32_000
    counted = (await http.post("/v1/tokenize", json={"model": MODEL, "prompt": text})).json()
    ids = (counted["tokens"] * 2)[: CONTEXT - 5]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 32000, "temperature": 0, "ignore_eos": True}
    answer = await http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hearth-clamped"] == "max_tokens"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", ASKED)
async def test_where_nothing_is_clamped_the_error_says_which_value_fits(chat_server: Server, path: str):
    key = await asyncio.to_thread(chat_server.make_key, "no-clamp", tier="standard")
    asked, field = ASKED[path]
    async with httpx2.AsyncClient(base_url=chat_server.root_url, headers={"x-api-key": key.text}, timeout=60) as http:
        refused = await http.post(path, json={"model": MODEL, "temperature": 0, **asked, field: 2047})
        assert_error(refused, 400, "context_length_exceeded", field)
        message = refused.json()["error"]["message"]
        assert message.startswith("This model's maximum context length is 2048 tokens")
        most = int(message.partition(f"Send `{field}` of at most ")[2].partition(",")[0])
        fits = await http.post(path, json={"model": MODEL, "temperature": 0, **asked, field: most})
        assert fits.status_code == 200, fits.text
        assert "x-hearth-clamped" not in fits.headers
        alone = await http.post(path, json={"model": MODEL, "temperature": 0, **asked, field: 32000})
        assert_error(alone, 400, "context_length_exceeded", field)
        assert f"Send `{field}` of at most {most}, or shorten" in alone.json()["error"]["message"]

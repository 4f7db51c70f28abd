"""Streams byte by byte: which chunks come in which order, and what they all have in common."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, PROMPTS, assert_error, body, raw_stream

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

ROLE = {"role": "assistant", "content": ""}
KEYS = ["id", "object", "created", "model", "choices"]


def of_choice(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def assert_choice_in_order(choices: list[dict[str, Any]], content: str, finish_reason: str) -> None:
    """The role first, then text, then one chunk with an empty delta and the reason."""
    first, *middle, last = choices
    assert (first["delta"], first["finish_reason"]) == (ROLE, None)
    assert (last["delta"], last["finish_reason"]) == ({}, finish_reason)
    assert all(list(choice["delta"]) == ["content"] and choice["finish_reason"] is None for choice in middle)
    assert "".join(choice["delta"]["content"] for choice in middle) == content
    assert all(choice["delta"]["content"] for choice in middle)


@pytest.mark.parametrize("include_usage", [None, False, True])
async def test_the_chunks_of_one_answer_come_in_the_order_of_the_contract(http: httpx2.AsyncClient, include_usage):
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    response, chunks = await raw_stream(http, messages=HELLO, **options)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"]
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    keys = [*KEYS, "usage"] if include_usage else KEYS
    assert all(list(chunk) == keys for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert (chunks[0]["model"], chunks[0]["object"]) == (MODEL, "chat.completion.chunk")
    assert chunks[0]["id"].startswith("chatcmpl-")
    if include_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks)
        usage = last["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        plain = (await http.post(CHAT, json=body(PROMPTS["say-hello"]))).json()["usage"]
        for detail in (usage, plain):
            del detail["prompt_tokens_details"]  # the second of two equal prompts is cached
        assert usage == plain
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all(list(chunk["choices"][0]) == ["index", "delta", "logprobs", "finish_reason"] for chunk in chunks)
    assert_choice_in_order(of_choice(chunks, 0), HELLO_ANSWER, "stop")


@pytest.mark.parametrize(("limit", "finish_reason"), [(None, "stop"), (2, "length")])
async def test_several_choices_each_have_their_own_beginning_and_end(http: httpx2.AsyncClient, limit, finish_reason):
    _, chunks = await raw_stream(http, messages=HELLO, n=3, max_tokens=limit, stream_options={"include_usage": True})
    plain = (await http.post(CHAT, json=body(PROMPTS["say-hello"], n=3, max_tokens=limit))).json()
    assert [choice["finish_reason"] for choice in plain["choices"]] == [finish_reason] * 3
    for index, choice in enumerate(plain["choices"]):
        assert_choice_in_order(of_choice(chunks, index), choice["message"]["content"], finish_reason)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


async def test_a_stop_sequence_is_held_back_until_it_is_none(http: httpx2.AsyncClient):
    prompt = PROMPTS["one-to-ten"]
    _, chunks = await raw_stream(http, messages=prompt.messages, stop=["four, five", "ten!"])
    assert_choice_in_order(of_choice(chunks, 0), prompt.answer.split("four, five")[0], "stop")


async def test_a_stop_sequence_at_the_very_start_gives_an_empty_answer(http: httpx2.AsyncClient):
    _, chunks = await raw_stream(http, messages=HELLO, stop="Hello")
    assert_choice_in_order(of_choice(chunks, 0), "", "stop")


async def test_text_of_many_bytes_per_letter_arrives_whole(http: httpx2.AsyncClient):
    prompt = PROMPTS["translate-amharic"]
    _, chunks = await raw_stream(http, messages=prompt.messages)
    assert_choice_in_order(of_choice(chunks, 0), prompt.answer, "stop")


async def test_probabilities_belong_to_the_tokens_that_were_sent(http: httpx2.AsyncClient):
    fields = {"messages": HELLO, "logprobs": True, "top_logprobs": 3}
    _, chunks = await raw_stream(http, **fields)
    choices = of_choice(chunks, 0)
    assert choices[0]["logprobs"] is None
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    plain = (await http.post(CHAT, json={"model": MODEL, "temperature": 0, **fields})).json()["choices"][0]
    entries = plain["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).startswith(HELLO_ANSWER.encode())
    for entry in entries:
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 3


async def test_no_probabilities_come_unasked(http: httpx2.AsyncClient):
    _, chunks = await raw_stream(http, messages=HELLO, logprobs=False)
    assert {str(choice["logprobs"]) for choice in of_choice(chunks, 0)} == {"None"}


async def test_each_call_begins_with_its_id_and_name(http: httpx2.AsyncClient):
    prompt = next(one for one in PROMPTS.values() if one.tool_calls and len(one.tool_calls) == 2)
    _, chunks = await raw_stream(http, messages=prompt.messages, tools=prompt.tools)
    first, *middle, last = of_choice(chunks, 0)
    assert first["delta"] == ROLE
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert all(list(choice["delta"]) == ["tool_calls"] for choice in middle)
    pieces = [piece for choice in middle for piece in choice["delta"]["tool_calls"]]
    for index, (name, arguments) in enumerate(prompt.tool_calls):
        opening, *rest = [piece for piece in pieces if piece["index"] == index]
        assert (opening["type"], opening["function"]["name"]) == ("function", name)
        assert opening["id"]
        assert all(list(piece) == ["index", "function"] and list(piece["function"]) == ["arguments"] for piece in rest)
        text = "".join(piece["function"]["arguments"] for piece in (opening, *rest))
        assert json.loads(text) == arguments


async def test_text_comes_while_it_is_made_not_at_the_end(http: httpx2.AsyncClient):
    request = body(PROMPTS["story"], max_tokens=2000, ignore_eos=True, stream=True)
    began = time.monotonic()
    async with http.stream("POST", CHAT, json=request) as response:
        came_at = [time.monotonic() async for _ in response.aiter_raw()]
    assert came_at[-1] - came_at[0] > 0.5 * (came_at[-1] - began)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, 400, "context_length_exceeded", "messages"),
        ({"logit_bias": {"999999": 1}}, 400, "invalid_value", "logit_bias"),
    ],
)
async def test_what_is_refused_is_refused_before_a_stream_opens(http: httpx2.AsyncClient, fields, status, code, param):
    response = await http.post(CHAT, json={"model": MODEL, "messages": HELLO, "stream": True, **fields})
    assert_error(response, status, code, param)


async def test_streams_side_by_side_do_not_mix(http: httpx2.AsyncClient):
    names = ["one-to-ten", "story", "agenda", "months", "table"] * 4
    answers = await asyncio.gather(*(raw_stream(http, messages=PROMPTS[name].messages) for name in names))
    for name, (_, chunks) in zip(names, answers, strict=True):
        assert_choice_in_order(of_choice(chunks, 0), PROMPTS[name].answer, "stop")
    assert len({chunks[0]["id"] for _, chunks in answers}) == len(names)

"""Chunks of a streamed answer: valid JSON, one line each, whatever the text."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import ChatDelta, ChatRequest, ChatStep, TokenLogprob, ToolCallDelta, Usage
from server.api.chat import ChatAnswer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
USAGE = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)


def encoder(*, n: int = 1, include_usage: bool = False) -> ChatAnswer:
    asked = ChatRequest(request_id="a", model='a "model"', messages=[], n=n)
    return ChatAnswer(asked, include_usage=include_usage)


def events(data: bytes) -> list[Any]:
    """What an SSE reader sees. It splits at line ends of any kind, so none may be inside an event."""
    assert data.endswith(b"\n\n")
    lines = data.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line and "\r" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


@settings(max_examples=200)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
@example(texts=["\u2028\u2029\x85", '\r\n\n"\\\x00\x1f\x7f', "data: [DONE]\n\n", "😀ሰላም"])
def test_any_text_survives_the_encoding(texts: list[str]):
    step = ChatStep(tuple(ChatDelta(i, content=text) for i, text in enumerate(texts)), USAGE)
    chunks = events(b"data: 0\n\n" + encoder(n=len(texts)).step(step))[1:]
    received = {chunk["choices"][0]["index"]: chunk["choices"][0]["delta"]["content"] for chunk in chunks}
    assert received == {i: text for i, text in enumerate(texts) if text}
    assert all((chunk["id"], chunk["model"]) == ("chatcmpl-a", 'a "model"') for chunk in chunks)
    assert len({chunk["created"] for chunk in chunks}) <= 1


@settings(max_examples=100)
@given(text=TEXT, name=TEXT, logprob=st.floats(max_value=0, allow_nan=False, allow_infinity=False))
def test_calls_reasoning_and_probabilities_survive_the_encoding(text: str, name: str, logprob: float):
    entry = TokenLogprob(text, logprob, tuple(text.encode()), top=(TokenLogprob(name, logprob, None),))
    calls = (ToolCallDelta(0, id="call", name=name, arguments=""), ToolCallDelta(0, arguments=text))
    delta = ChatDelta(0, reasoning=text or "r", tool_calls=calls, logprobs=(entry,))
    (chunk,) = events(encoder().step(ChatStep((delta,), USAGE)))
    (choice,) = chunk["choices"]
    assert choice["delta"]["reasoning_content"] == choice["delta"]["reasoning"] == (text or "r")
    assert choice["delta"]["tool_calls"] == [
        {"index": 0, "id": "call", "type": "function", "function": {"name": name, "arguments": ""}},
        {"index": 0, "function": {"arguments": text}},
    ]
    assert choice["logprobs"]["content"] == [
        {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [{"token": name, "logprob": logprob, "bytes": None}],
        }
    ]


def test_the_last_text_and_the_end_of_a_choice_are_two_chunks():
    chunks = events(encoder().step(ChatStep((ChatDelta(0, content="x", finish_reason="length"),), USAGE)))
    assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ({"content": "x"}, None),
        ({}, "length"),
    ]


def test_a_step_that_adds_nothing_sends_nothing():
    assert encoder().step(ChatStep((ChatDelta(0),), USAGE)) == b""


@pytest.mark.parametrize("include_usage", [True, False])
def test_usage_is_only_on_the_wire_when_it_was_asked_for(*, include_usage: bool):
    made = encoder(n=2, include_usage=include_usage)
    chunks = events(made.start() + made.step(ChatStep((ChatDelta(1, content="x"),), USAGE)))
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1]
    assert all(("usage" in chunk) == include_usage and chunk.get("usage") is None for chunk in chunks)
    end = made.end(USAGE)
    assert end.endswith(b"data: [DONE]\n\n")
    last = [] if end == b"data: [DONE]\n\n" else events(end)
    assert [(chunk["choices"], chunk["usage"]["total_tokens"]) for chunk in last] == (
        [([], 7)] if include_usage else []
    )

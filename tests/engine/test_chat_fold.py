"""Folding the steps of a streamed answer gives what a reader of the stream would have put together."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import ChatDelta, ChatStep, GenerationError, TokenLogprob, ToolCallDelta, Usage
from engine.stream import fold

PIECES = st.lists(st.text(max_size=5), max_size=8)


def usage(tokens: int) -> Usage:
    return Usage(prompt_tokens=1, completion_tokens=tokens)


async def stream(*steps: ChatStep) -> AsyncIterator[ChatStep]:
    for step in steps:
        yield step


@settings(max_examples=100)
@given(texts=st.lists(PIECES, min_size=1, max_size=3), thoughts=PIECES, order=st.randoms(use_true_random=False))
async def test_a_fold_is_the_concatenation_of_the_pieces_of_each_choice(texts, thoughts, order):
    queues = [[ChatDelta(i, content=piece) for piece in pieces] for i, pieces in enumerate(texts)]
    queues[0] += [ChatDelta(0, reasoning=piece) for piece in thoughts]
    for i, queue in enumerate(queues):
        queue.append(ChatDelta(i, finish_reason="length" if i else "stop"))
    steps = []
    while any(queues):
        chosen = [queue.pop(0) for queue in queues if queue and order.random() < 0.7]
        steps.append(ChatStep(tuple(chosen), usage(len(steps))))
    result = await fold(stream(*steps))
    assert [choice.content for choice in result.choices] == ["".join(pieces) for pieces in texts]
    assert [choice.index for choice in result.choices] == list(range(len(texts)))
    assert result.choices[0].reasoning == "".join(thoughts)
    assert [choice.finish_reason for choice in result.choices] == ["stop", *["length"] * (len(texts) - 1)]
    assert result.usage == usage(len(steps) - 1)
    assert all(choice.tool_calls == () and choice.logprobs is None for choice in result.choices)


async def test_pieces_of_parallel_calls_are_put_together_by_their_index():
    pieces = [
        (ToolCallDelta(1, id="b", name="second"), ToolCallDelta(0, id="a", name="first", arguments="{")),
        (ToolCallDelta(0, arguments='"x": 1}'), ToolCallDelta(1, arguments="{}")),
    ]
    steps = [ChatStep((ChatDelta(0, tool_calls=calls),), usage(1)) for calls in pieces]
    end = ChatStep((ChatDelta(0, finish_reason="tool_calls"),), usage(2))
    (choice,) = (await fold(stream(*steps, end))).choices
    assert [(call.id, call.name, call.arguments) for call in choice.tool_calls] == [
        ("a", "first", '{"x": 1}'),
        ("b", "second", "{}"),
    ]


async def test_probabilities_are_kept_in_order():
    entries = [TokenLogprob(token, -1.0, None) for token in "abc"]
    steps = [ChatStep((ChatDelta(0, content=entry.token, logprobs=(entry,)),), usage(1)) for entry in entries]
    end = ChatStep((ChatDelta(0, logprobs=(), finish_reason="stop"),), usage(1))
    assert (await fold(stream(*steps, end))).choices[0].logprobs == tuple(entries)


@pytest.mark.parametrize("steps", [[], [ChatStep((ChatDelta(0, content="half"),), usage(1))]])
async def test_an_answer_that_never_ends_is_a_failure(steps: list[ChatStep]):
    with pytest.raises(GenerationError):
        await fold(stream(*steps))

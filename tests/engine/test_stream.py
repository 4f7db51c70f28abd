"""A stream ends once and tells its owners; a sink takes items at once; a slow reader costs no memory per token."""

import asyncio

import pytest

from engine.errors import GenerationError
from engine.stream import Stream, StreamClosedError, TokenStream
from engine.types import ChatDelta, ChatStep, TokenLogprob, ToolCallDelta, Usage


def step(text: str, tokens: int, **fields: object) -> ChatStep:
    return ChatStep((ChatDelta(0, text, **fields),), Usage(3, tokens))


async def test_owners_are_called_once_the_last_registered_first():
    stream, called = Stream[int](), []
    stream.on_end(lambda error: called.append(("first", error)))
    stream.on_end(lambda error: called.append(("second", error)))
    stream.put(1)
    stream.finish()
    stream.finish(ValueError())
    stream.close()
    assert called == [("second", None), ("first", None)]
    stream.on_end(lambda error: called.append(("late", error)))
    assert called[-1] == ("late", None)


async def test_an_owner_that_fails_does_not_keep_others_from_being_called():
    stream, called = Stream[int](), []
    stream.on_end(called.append)
    stream.on_end(lambda _: 1 / 0)
    stream.finish()
    assert called == [None]


async def test_what_was_put_is_read_before_the_end_and_before_an_error():
    stream = Stream[int]()
    for number in range(3):
        stream.put(number)
    stream.finish(ValueError("broken"))
    stream.put(4)
    read = []
    read += [await anext(stream), await anext(stream), await anext(stream)]
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert read == [0, 1, 2]


async def test_closing_aborts_what_is_not_finished_and_nothing_else():
    aborted, ends = [], []
    for finished in (False, True):
        stream = Stream[int]()
        stream.abort = lambda finished=finished: aborted.append(finished)
        stream.on_end(ends.append)
        if finished:
            stream.finish()
        stream.close()
        stream.close()
    assert aborted == [False]
    assert isinstance(ends[0], StreamClosedError)
    assert ends[1] is None


async def test_a_sink_takes_items_while_the_reader_waits_and_what_it_refuses_is_read():
    stream, taken = Stream[int](), []
    stream.sink = lambda item: item % 2 == 0 and taken.append(item) is None
    stream.put(0)  # nobody waits
    assert await anext(stream) == 0
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    for number in (2, 4, 5, 6):
        stream.put(number)
    assert taken == [2, 4]
    assert await reader == 5
    assert await anext(stream) == 6


async def test_a_sink_that_fails_ends_its_stream_and_aborts():
    stream, aborted = Stream[int](), []
    stream.abort = lambda: aborted.append(1)
    stream.sink = lambda item: item / 0
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.put(1)
    with pytest.raises(ZeroDivisionError):
        await reader
    assert aborted == [1]


async def test_unread_text_becomes_one_step_and_all_tokens_count():
    stream = TokenStream()
    for tokens, text in enumerate("abc", 1):
        stream.put(step(text, tokens))
    stream.put(step("d", 4, finish_reason="stop", stop_text="x"))
    stream.finish()
    (only,) = [item async for item in stream]
    assert only == step("abcd", 4, finish_reason="stop", stop_text="x")
    assert stream.usage == Usage(3, 4)


async def test_unread_reasoning_becomes_one_step_too_and_comes_before_the_answer():
    stream = TokenStream()
    stream.put(step("", 1, reasoning="so"))
    stream.put(step("", 2, reasoning=" then"))
    stream.put(step("a", 3))
    stream.put(step("", 4, reasoning="again"))
    stream.finish()
    assert [item async for item in stream] == [step("a", 3, reasoning="so then"), step("", 4, reasoning="again")]


async def test_a_refused_request_is_not_kept_by_its_stream():
    stream, ends = TokenStream(), []
    stream.on_end(ends.append)
    error = ValueError()
    stream.refuse(error)
    assert ends == [error]
    assert [item async for item in stream] == []


async def test_a_sink_may_end_its_stream():
    stream = TokenStream()
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)

    def end(_: ChatStep) -> bool:
        stream.close()
        return False

    stream.sink = end
    stream.put(step("a", 1))
    with pytest.raises(StreamClosedError):
        await reader


async def test_steps_with_more_than_text_are_kept_apart():
    stream = TokenStream()
    call = (ToolCallDelta(0, "id", "name", "{"),)
    stream.put(step("a", 1))
    stream.put(step("", 2, tool_calls=call))
    stream.put(ChatStep((ChatDelta(0, "b"), ChatDelta(1, "c")), Usage(3, 4)))
    stream.finish()
    assert len([item async for item in stream]) == 3


async def test_what_is_not_read_and_cannot_be_joined_ends_its_answer():
    stream, aborted, count = TokenStream(), [], 0
    stream.abort = lambda: aborted.append(count)
    likely = tuple(TokenLogprob("a", -1.0, None, ()) for _ in range(20))
    while not stream.finished:
        count += 1
        stream.put(step("a", count, logprobs=(TokenLogprob("a", -1.0, None, likely),)))
    assert 3000 < count < 4000, "16 MiB"
    assert aborted == [count]
    with pytest.raises(GenerationError, match="not read for too long"):
        async for _ in stream:
            pass
    read = TokenStream()
    for number in range(100_000):
        read.put(step("a", number))
    assert not read.finished


async def test_unread_steps_of_several_choices_are_joined_by_choice_and_never_overtake():
    stream = TokenStream()
    for count in range(40):
        stream.put(ChatStep((ChatDelta(count % 4, str(count % 4)),), Usage(3, count + 1)))
    read = [await anext(stream) for _ in range(4)]
    assert sorted((one.deltas[0].index, one.deltas[0].content) for one in read) == [(n, str(n) * 10) for n in range(4)]
    assert [one.usage.completion_tokens for one in read] == [37, 38, 39, 40]
    call = ToolCallDelta(0, "a", "look", "{}")
    stream.put(step("Let me see.", 41))
    stream.put(step("", 42, tool_calls=(call,)))
    stream.put(step("", 43, finish_reason="tool_calls"))
    stream.finish()
    last = [one.deltas[0] async for one in stream]
    assert [(one.content, one.tool_calls, one.finish_reason) for one in last] == [
        ("Let me see.", (), None),
        ("", (call,), None),
        ("", (), "tool_calls"),
    ]

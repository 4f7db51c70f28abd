"""Steps reach whoever waits for them in their order, woken for each or taken at once, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from engine.backends.plain_steps import PlainSteps
from engine.types import ChatDelta, ChatStep, FinishReason, Usage


def step(text: str, tokens: int, finish_reason: FinishReason | None = None) -> ChatStep:
    return ChatStep((ChatDelta(0, text, finish_reason=finish_reason),), Usage(3, tokens))


class Taker:
    """What takes steps at once; `willing` says whether."""

    def __init__(self) -> None:
        self.willing = True
        self.seen: list[str] = []

    def __call__(self, one: ChatStep) -> bool:
        if self.willing:
            self.seen.append(one.deltas[0].content)
        return self.willing


async def waiting_reader(steps: PlainSteps) -> asyncio.Task[ChatStep]:
    reader = asyncio.create_task(steps.get())
    await asyncio.sleep(0)
    return reader


async def test_steps_that_nobody_has_fetched_become_one() -> None:
    steps = PlainSteps()
    for number, text in enumerate(["a", "b", "c"], 1):
        steps.put(step(text, number))
    steps.put(step("d", 4, "length"))
    merged = await steps.get()
    assert (merged.deltas[0].content, merged.deltas[0].finish_reason) == ("abcd", "length")
    assert merged.usage.completion_tokens == 4


async def test_a_step_is_taken_at_once_only_while_the_reader_waits() -> None:
    taker = Taker()
    steps = PlainSteps(taker)
    steps.put(step("a", 1))  # nobody waits yet: they are for the reader, in their order
    steps.put(step("b", 2))
    assert (await steps.get()).deltas[0].content == "ab"
    steps.put(step("c", 3))  # the reader is busy with the last one
    reader = await waiting_reader(steps)
    assert (await reader).deltas[0].content == "c"
    reader = await waiting_reader(steps)
    steps.put(step("d", 4))
    steps.put(step("e", 5))
    assert (taker.seen, reader.done(), steps.answer_tokens) == (["d", "e"], False, 5)
    steps.put(step("f", 6, "stop"))  # the last one is always the reader's
    assert (await reader).deltas[0].content == "f"
    assert taker.seen == ["d", "e"]


async def test_what_is_not_taken_comes_to_the_reader_and_so_does_all_behind_it() -> None:
    taker = Taker()
    steps = PlainSteps(taker)
    reader = await waiting_reader(steps)
    steps.put(step("a", 1))
    taker.willing = False
    steps.put(step("b", 2))
    taker.willing = True
    steps.put(step("c", 3))  # b is on its way
    assert (await reader).deltas[0].content == "bc"
    assert steps.answer_tokens == 3
    assert taker.seen == ["a"]


async def test_the_answer_has_as_many_tokens_as_were_made_whoever_left_before_they_were_fetched() -> None:
    steps = PlainSteps()
    for tokens in (1, 2, 5):
        steps.put(step("a", tokens))
    assert steps.answer_tokens == 5


async def test_a_taker_that_fails_ends_its_own_request_and_not_the_loop_that_puts() -> None:
    def fails(_: ChatStep) -> bool:
        raise ZeroDivisionError

    steps = PlainSteps(fails)
    reader = await waiting_reader(steps)
    steps.put(step("a", 1))
    with pytest.raises(ZeroDivisionError):
        await reader


async def test_the_death_of_the_engine_wakes_the_reader() -> None:
    steps = PlainSteps(Taker())
    reader = await waiting_reader(steps)
    steps.put(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await reader

"""Turns are few, bounded for each owner, and given out owner by owner."""

import asyncio
import contextlib

import pytest
from skipping_loop import settle

from engine.backends.vllm.grammars import FairTurns
from engine.errors import OverloadedError


def fair_turns(**changed: float) -> FairTurns:
    limits = {"most_waiting": 8, "wait_seconds": 60.0} | changed
    return FairTurns(3, 2, most_waiting=int(limits["most_waiting"]), wait_seconds=limits["wait_seconds"])


def wanted(turns: FairTurns, *owners: str) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(turns.enter(owner)) for owner in owners]


async def inside(tasks: list[asyncio.Task[None]]) -> list[bool]:
    await settle()
    return [task.done() for task in tasks]


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_one_owner_never_takes_the_last_turn_of_the_others() -> None:
    turns = fair_turns()
    tasks = wanted(turns, "greedy", "greedy", "greedy", "modest")
    assert await inside(tasks) == [True, True, False, True]
    turns.leave("greedy")
    assert await inside(tasks) == [True, True, True, True]


async def test_those_who_wait_go_in_turn_owner_by_owner() -> None:
    turns = fair_turns()
    wanted(turns, "a", "a", "b")
    tasks = wanted(turns, "a", "a", "b", "c")
    assert await inside(tasks) == [False] * 4
    turns.leave("a")
    turns.leave("b")
    assert await inside(tasks) == [False, False, True, True]
    turns.leave("a")
    assert await inside(tasks) == [True, False, True, True]
    await end(tasks)


async def test_who_leaves_the_line_gives_the_place_to_the_next() -> None:
    turns = fair_turns(most_waiting=1)
    await asyncio.gather(*wanted(turns, "a", "a"))
    (first,) = wanted(turns, "a")
    assert await inside([first]) == [False]
    with pytest.raises(OverloadedError) as caught:
        await turns.enter("a")
    assert caught.value.retry_after_seconds > 0
    await end([first])
    (second,) = wanted(turns, "a")
    turns.leave("a")
    assert await inside([second]) == [True]


async def test_waiting_has_an_end() -> None:
    turns = fair_turns(wait_seconds=0.01)
    await asyncio.gather(*wanted(turns, "a", "a"))
    with pytest.raises(OverloadedError, match="schemas are waiting"):
        await turns.enter("a")
    turns.leave("a")
    await turns.enter("a")


async def test_without_limits_everybody_waits_and_a_turn_ends_with_its_block() -> None:
    turns, ran = FairTurns(2, 1), []

    async def run(owner: str) -> None:
        async with turns.turn(owner):
            ran.append(owner)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for owner in (*["many"] * 1000, "one"):
            group.create_task(run(owner))
    assert ran.index("one") <= 2
    assert len(ran) == 1001

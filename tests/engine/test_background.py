"""How many background sequences may be in an engine at once."""

from __future__ import annotations

import asyncio

import pytest

from engine.background import BackgroundSlots


class Worker:
    """Holds `sequences` slots from when it gets them until `done` is set."""

    def __init__(self, slots: BackgroundSlots, sequences: int) -> None:
        self.inside = asyncio.Event()
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._work(slots, sequences))

    async def _work(self, slots: BackgroundSlots, sequences: int) -> None:
        async with slots.take(sequences):
            self.inside.set()
            await self.done.wait()


async def turns() -> None:
    """Let everything that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_more_than_fits_waits_in_order_and_a_small_one_does_not_overtake() -> None:
    slots = BackgroundSlots(4)
    first, large, small = Worker(slots, 3), Worker(slots, 4), Worker(slots, 1)
    await turns()
    assert [worker.inside.is_set() for worker in (first, large, small)] == [True, False, False]
    first.done.set()
    await turns()
    assert [worker.inside.is_set() for worker in (large, small)] == [True, False]
    large.done.set()
    await turns()
    assert small.inside.is_set()
    small.done.set()
    await asyncio.gather(first.task, large.task, small.task)


async def test_one_that_wants_more_than_there_is_gets_all() -> None:
    slots = BackgroundSlots(2)
    async with slots.take(8):
        other = Worker(slots, 1)
        await turns()
        assert not other.inside.is_set()
    await turns()
    assert other.inside.is_set()
    other.done.set()
    await other.task


@pytest.mark.parametrize("holder_leaves_first", [True, False])
async def test_a_cancelled_waiter_takes_nothing_and_blocks_nobody(holder_leaves_first: bool) -> None:  # noqa: FBT001
    slots = BackgroundSlots(1)
    holder, cancelled, last = Worker(slots, 1), Worker(slots, 1), Worker(slots, 1)
    await turns()
    if holder_leaves_first:
        holder.done.set()
        await holder.task  # the waiter's turn has come, and it has not run yet
    cancelled.task.cancel()
    await turns()
    holder.done.set()
    await turns()
    assert cancelled.task.cancelled()
    assert last.inside.is_set()
    last.done.set()
    await asyncio.gather(holder.task, last.task)

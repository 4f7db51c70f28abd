"""The admission before rendering: how many sequences of what can wait may be in an engine at once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from skipping_loop import on_skipping_loop, settle

from engine.admission import PATIENCE_SECONDS, Admission, Room, Ticket
from engine.types import Urgency


class Worker:
    """Runs `sequences` of them from when it gets them until `done` is set."""

    def __init__(self, queue: Admission, sequences: int, urgency: Urgency = Urgency.BATCH) -> None:
        self.inside = asyncio.Event()
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._work(asking(queue, sequences, urgency=urgency)))

    async def _work(self, ticket: Ticket) -> None:
        async with ticket:
            self.inside.set()
            await self.done.wait()


def admission(sequences: int, *, beside: int, **quiet: float) -> Admission:
    return Admission(Room(sequences, waiting=0, beside_interactive=beside, **quiet))


def asking(queue: Admission, sequences: int, owner: str = "a", urgency: Urgency = Urgency.BATCH) -> Ticket:
    return queue.enter(owner, prompt_tokens=sequences, max_tokens=0, sequences=sequences, urgency=urgency)


@contextmanager
def interactive(queue: Admission) -> Iterator[None]:
    queue.begin_interactive()
    try:
        yield
    finally:
        queue.end_interactive()


async def test_more_than_fits_waits_in_order_and_a_small_one_does_not_overtake() -> None:
    queue = admission(4, beside=1)
    first, large, small = Worker(queue, 3), Worker(queue, 4), Worker(queue, 1)
    await settle()
    assert [worker.inside.is_set() for worker in (first, large, small)] == [True, False, False]
    first.done.set()
    await settle()
    assert [worker.inside.is_set() for worker in (large, small)] == [True, False]
    large.done.set()
    await settle()
    assert small.inside.is_set()
    small.done.set()
    await asyncio.gather(first.task, large.task, small.task)


async def test_one_that_wants_more_than_there_is_gets_all() -> None:
    queue = admission(2, beside=1)
    async with asking(queue, 8):
        other = Worker(queue, 1)
        await settle()
        assert not other.inside.is_set()
    await settle()
    assert other.inside.is_set()
    other.done.set()
    await other.task


@pytest.mark.parametrize("holder_leaves_first", [True, False])
async def test_a_cancelled_waiter_takes_nothing_and_blocks_nobody(holder_leaves_first: bool) -> None:  # noqa: FBT001
    queue = admission(1, beside=1)
    holder, cancelled, last = Worker(queue, 1), Worker(queue, 1), Worker(queue, 1)
    await settle()
    if holder_leaves_first:
        holder.done.set()
        await holder.task  # the waiter's turn has come, and it has not run yet
    cancelled.task.cancel()
    await settle()
    holder.done.set()
    await settle()
    assert cancelled.task.cancelled()
    assert last.inside.is_set()
    last.done.set()
    await asyncio.gather(holder.task, last.task)


@on_skipping_loop
async def test_beside_interactive_requests_only_a_few_run_and_the_rest_when_it_is_quiet() -> None:
    queue = admission(4, beside=2, quiet_seconds=3)
    with interactive(queue):
        workers = [Worker(queue, 1) for _ in range(4)]
        await settle()
        assert [worker.inside.is_set() for worker in workers] == [True, True, False, False]
        workers[0].done.set()
        await settle()
        assert [worker.inside.is_set() for worker in workers] == [True, True, True, False]
    await asyncio.sleep(2.9)
    assert not workers[3].inside.is_set()  # the next interactive request is still to be expected
    await asyncio.sleep(0.2)
    assert workers[3].inside.is_set()
    for worker in workers:
        worker.done.set()
        await worker.task


@pytest.mark.parametrize("asked", [1, 3])
@on_skipping_loop
async def test_background_requests_wait_longer_for_quiet_than_batches(asked: int) -> None:
    queue = admission(8, beside=2, quiet_seconds=1, background_quiet_seconds=10)
    for _ in range(asked):  # each begins the wait anew
        with interactive(queue):
            await asyncio.sleep(0.8)
    batches = [Worker(queue, 1) for _ in range(3)]
    lines = [Worker(queue, 1, Urgency.BACKGROUND) for _ in range(3)]
    began = asyncio.get_running_loop().time()
    await batches[2].inside.wait()
    assert not lines[0].inside.is_set()
    assert asyncio.get_running_loop().time() - began == pytest.approx(1)
    await lines[2].inside.wait()
    assert asyncio.get_running_loop().time() - began == pytest.approx(10)
    for worker in (*batches, *lines):
        worker.done.set()
        await worker.task


async def test_some_background_requests_always_run_beside_interactive_ones() -> None:
    queue = admission(8, beside=2)
    with interactive(queue):
        lines = [Worker(queue, 1, Urgency.BACKGROUND) for _ in range(8)]
        for ended, line in enumerate(lines):
            await settle()
            assert sum(one.inside.is_set() for one in lines) == min(ended + 2, 8)
            line.done.set()
            await line.task


async def test_lines_leave_some_places_to_batches_which_need_not_wait_for_their_end() -> None:
    now = [0.0]
    queue = Admission(Room(8, waiting=0, beside_interactive=2), clock=lambda: now[0])
    lines = [Worker(queue, 1, Urgency.BACKGROUND) for _ in range(8)]
    await settle()
    assert sum(line.inside.is_set() for line in lines) == 6
    now[0] += 2 * PATIENCE_SECONDS  # two wait like batches now, and before one that comes
    batches = [Worker(queue, 1) for _ in range(3)]
    await settle()
    assert [batch.inside.is_set() for batch in batches] == [True, True, False]
    lines[0].done.set()
    await settle()
    assert batches[2].inside.is_set()
    assert sum(line.inside.is_set() for line in lines) == 6
    for worker in (*lines, *batches):
        worker.done.set()
        await worker.task


@on_skipping_loop
async def test_an_interactive_request_in_the_quiet_time_ends_it_for_all() -> None:
    queue = admission(4, beside=1, quiet_seconds=1, background_quiet_seconds=1)
    first, *others = (Worker(queue, 1, urgency) for urgency in (Urgency.BATCH, Urgency.BATCH, Urgency.BACKGROUND))
    with interactive(queue):
        await settle()
    with interactive(queue):
        await asyncio.sleep(2)
        assert [one.inside.is_set() for one in (first, *others)] == [True, False, False]
    await asyncio.sleep(2)
    assert [one.inside.is_set() for one in others] == [True, True]
    for worker in (first, *others):
        worker.done.set()
        await worker.task


@on_skipping_loop
async def test_a_pause_between_two_interactive_requests_is_not_quiet_by_default() -> None:
    queue = admission(4, beside=1)
    with interactive(queue):
        workers = [Worker(queue, 1) for _ in range(2)]
        await settle()
    await asyncio.sleep(0.2)
    assert [worker.inside.is_set() for worker in workers] == [True, False]
    for worker in workers:
        worker.done.set()
        await worker.task


async def test_what_runs_already_goes_on_when_somebody_asks() -> None:
    queue = admission(4, beside=1)
    workers = [Worker(queue, 2), Worker(queue, 2)]
    await settle()
    with interactive(queue):
        assert [worker.inside.is_set() for worker in workers] == [True, True]
        last = Worker(queue, 1)
        workers[0].done.set()
        await workers[0].task
        await settle()
        assert not last.inside.is_set()
        workers[1].done.set()
        await workers[1].task
        await settle()
        assert last.inside.is_set()
    last.done.set()
    await last.task


async def test_one_too_large_for_the_room_beside_others_runs_alone() -> None:
    queue = admission(4, beside=1, quiet_seconds=60)
    with interactive(queue):
        async with asyncio.timeout(10), asking(queue, 3):
            pass


async def test_those_who_waited_come_in_one_at_a_time_so_that_others_get_between() -> None:
    queue = admission(3, beside=3)
    order: list[int] = []

    async def work(number: int) -> None:
        async with asking(queue, 1):
            order.append(number)
            asyncio.get_running_loop().call_soon(order.append, 0)

    async with asking(queue, 3):
        waiting = [asyncio.create_task(work(number)) for number in (1, 2, 3)]
        await settle()
    await asyncio.gather(*waiting)
    assert order.index(0) < order.index(3)


async def test_a_small_batch_does_not_wait_for_all_of_a_large_one_of_somebody_else() -> None:
    queue = admission(1, beside=1)
    order: list[str] = []

    async def work(owner: str) -> None:
        async with asking(queue, 1, owner):
            order.append(owner)
            await asyncio.sleep(0)

    jobs = [asyncio.create_task(work(owner)) for owner in ["large"] * 50 + ["small"] * 2]
    await asyncio.gather(*jobs)
    assert [place for place, owner in enumerate(order) if owner == "small"][-1] < 8

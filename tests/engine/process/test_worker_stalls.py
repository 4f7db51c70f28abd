"""A worker that hangs is killed, whatever it is doing; one that works on and on is not. Real children."""

import asyncio
import logging
import os
import signal
import time
from typing import Any

import pytest
from workers import DEADLINE_SECONDS, begun_together, collect, job_of, on_both_loops, start, worker

from engine.errors import EngineDiedError
from engine.process.parent import CANCEL_SECONDS, WorkerDiedError
from engine.process.watchdog import Patience

PATIENCE = Patience(loading_seconds=1.5, still_seconds=1.5, busy_seconds=6.0)


@on_both_loops
async def test_a_child_that_is_stopped_in_a_job_ends_the_job_and_dies() -> None:
    async with worker("dies:open_service", patience=PATIENCE) as running:
        job = job_of(running, b"hang")
        assert await anext(job) == b"started"
        os.kill(running.pid, signal.SIGSTOP)
        with pytest.raises(EngineDiedError):
            await asyncio.wait_for(anext(job), DEADLINE_SECONDS)
        await asyncio.wait_for(running.died.wait(), DEADLINE_SECONDS)
        assert running.exit_status == -signal.SIGKILL


async def a_child_that_is_stopped_with_nothing_to_do_is_noticed_before_anybody_needs_it() -> None:
    async with worker(patience=PATIENCE) as running:
        os.kill(running.pid, signal.SIGSTOP)
        await asyncio.wait_for(running.died.wait(), DEADLINE_SECONDS)


async def a_step_that_waits_for_ever_is_a_hang() -> None:
    async with worker("slow:open_service", patience=PATIENCE) as running:
        with pytest.raises(EngineDiedError):
            await asyncio.wait_for(collect(running, b"sleep 3600"), DEADLINE_SECONDS)


async def a_step_that_computes_for_longer_than_it_may_stand_still_survives() -> None:
    async with worker("slow:open_service", patience=PATIENCE) as running:
        assert await asyncio.wait_for(collect(running, b"compute 3"), DEADLINE_SECONDS) == [b"started"]
        assert not running.died.is_set()


async def a_step_that_computes_without_an_end_is_a_hang() -> None:
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    try:
        async with worker("slow:open_service", patience=PATIENCE) as running:
            with pytest.raises(EngineDiedError):
                await asyncio.wait_for(collect(running, b"compute 3600"), DEADLINE_SECONDS)
    finally:
        logging.getLogger().removeHandler(listener)
    assert any("has not finished anything" in line for line in said)


async def a_child_that_hangs_while_it_loads_is_killed() -> None:
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await asyncio.wait_for(start("loads:never_end", patience=PATIENCE), DEADLINE_SECONDS)


async def a_child_whose_events_nobody_reads_does_not_hang() -> None:
    async with worker("floods:open_service", patience=PATIENCE) as running:
        job = job_of(running, b"70")  # more than the parent keeps unread
        await anext(job)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.died.wait(), 3 * PATIENCE.still_seconds)
        assert len([event async for event in job]) == 69


async def closing_a_run_does_not_wait_for_ever_for_a_service_that_ignores_it() -> None:
    async with worker("deaf:open_service") as running:
        job = job_of(running, b"")
        await anext(job)
        began = time.monotonic()
        await job.aclose()
        assert time.monotonic() - began > CANCEL_SECONDS - 0.1, "it may take a while to let go"
        assert await collect(running, b"let go") == []
        assert running._jobs == {}


SCENARIOS = (
    a_child_that_is_stopped_with_nothing_to_do_is_noticed_before_anybody_needs_it,
    a_step_that_waits_for_ever_is_a_hang,
    a_step_that_computes_for_longer_than_it_may_stand_still_survives,
    a_step_that_computes_without_an_end_is_a_hang,
    a_child_that_hangs_while_it_loads_is_killed,
    a_child_whose_events_nobody_reads_does_not_hang,
    closing_a_run_does_not_wait_for_ever_for_a_service_that_ignores_it,
)
begun = begun_together(*SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_what_hangs_is_ended_and_what_works_is_left_alone(begun: dict[Any, Any], scenario: Any) -> None:
    await begun[scenario]

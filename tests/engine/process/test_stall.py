"""A process that hangs is seen, one that works or answers is left alone. Real processes, real signals."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from workers import begun_together

from engine.process.watchdog import Guard, Patience

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import signal\nprint(flush=True)\nsignal.pause()"
# A parent that computes and one of its children, which sleeps; the child's number is printed.
FAMILY = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
while sys.stdin.readable(): pass
"""
STILL_SECONDS = 1.5
DEADLINE_SECONDS = 60.0
FOR_EVER = 1e6


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun; killed at the end."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.first_line = process.stdout.readline()  # type: ignore[attr-defined]
            yield process
        finally:
            process.kill()


def watched(process: Any, *, busy_seconds: float = FOR_EVER) -> tuple[Guard, asyncio.Future[str]]:
    hung: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    patience = Patience(loading_seconds=STILL_SECONDS, still_seconds=STILL_SECONDS, busy_seconds=busy_seconds)
    return Guard(patience, lambda: [process.pid], hung.set_result), hung


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def one_that_neither_answers_nor_computes_hangs():
    with running(SLEEP) as process:
        guard, hung = watched(process)
        guard.watch(never)
        assert "not computed" in await asyncio.wait_for(hung, DEADLINE_SECONDS)


async def one_that_computes_may_be_silent_but_not_for_ever():
    with running(SPIN) as process:
        began = asyncio.get_running_loop().time()
        guard, hung = watched(process, busy_seconds=3 * STILL_SECONDS)
        guard.watch(never)
        assert "it computes" in await asyncio.wait_for(hung, DEADLINE_SECONDS)
        assert asyncio.get_running_loop().time() - began >= 3 * STILL_SECONDS


async def one_that_is_stopped_hangs_however_much_it_had_computed():
    with running(SPIN) as process:
        guard, hung = watched(process)
        guard.watch(never)
        process.send_signal(signal.SIGSTOP)
        assert "stopped by a signal" in await asyncio.wait_for(hung, DEADLINE_SECONDS)


async def one_whose_child_is_stopped_hangs_although_it_waits_busily():
    with running(FAMILY) as process:
        child = int(process.first_line)  # type: ignore[attr-defined]
        guard, hung = watched(process)
        guard.watch(never)
        os.kill(child, signal.SIGSTOP)
        try:
            assert "stopped by a signal" in await asyncio.wait_for(hung, DEADLINE_SECONDS)
        finally:
            os.kill(child, signal.SIGKILL)


async def one_that_answers_may_do_nothing_at_all():
    pings = 0
    enough = asyncio.Event()

    async def ping() -> None:
        nonlocal pings
        pings += 1
        if pings == 25:  # more than twice its patience
            enough.set()

    with running(SLEEP) as process:
        guard, hung = watched(process)
        guard.watch(ping)
        await asyncio.wait_for(enough.wait(), DEADLINE_SECONDS)
        assert not hung.done()
        guard.end()


async def one_that_says_that_it_is_dead_is_believed():
    async def ping() -> None:
        raise ConnectionError

    with running(SLEEP) as process:
        guard, hung = watched(process)
        guard.watch(ping)
        assert "takes no more requests (ConnectionError)" in await asyncio.wait_for(hung, DEADLINE_SECONDS)


async def one_that_loads_must_compute_but_need_not_answer():
    with running(SPIN) as process:
        guard, hung = watched(process)
        guard.watch()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(hung), 3 * STILL_SECONDS)
        process.send_signal(signal.SIGSTOP)
        assert "while it loads" in await asyncio.wait_for(hung, DEADLINE_SECONDS)


async def what_is_gone_or_not_yet_there_does_not_hang():
    with running(SLEEP) as process:
        pass
    guard, hung = watched(process)
    guard.watch()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(hung), 2 * STILL_SECONDS)
    guard.end()


SCENARIOS = (
    one_that_neither_answers_nor_computes_hangs,
    one_that_computes_may_be_silent_but_not_for_ever,
    one_that_is_stopped_hangs_however_much_it_had_computed,
    one_whose_child_is_stopped_hangs_although_it_waits_busily,
    one_that_answers_may_do_nothing_at_all,
    one_that_says_that_it_is_dead_is_believed,
    one_that_loads_must_compute_but_need_not_answer,
    what_is_gone_or_not_yet_there_does_not_hang,
)
begun = begun_together(*SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_what_hangs_is_seen_and_what_does_not_is_left_alone(begun: dict[Any, Any], scenario: Any):
    await begun[scenario]


async def test_who_is_never_to_be_killed_is_not_watched():
    assert Patience.of(None, on_cpu=True) is None
    guard = Guard(None, lambda: [1], pytest.fail)
    guard.watch()
    guard.watch(never)
    guard.end()


def test_a_step_may_compute_for_longer_on_a_cpu_than_on_a_gpu():
    cpu, gpu = Patience.of(30, on_cpu=True), Patience.of(30, on_cpu=False)
    assert cpu == Patience(loading_seconds=120, still_seconds=30, busy_seconds=600)
    assert gpu == Patience(loading_seconds=120, still_seconds=30, busy_seconds=120)

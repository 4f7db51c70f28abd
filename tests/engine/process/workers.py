"""Starts workers with the services of `misbehaving/`, and runs tests on both event loops. Holds no tests."""

import asyncio
import inspect
import os
import select
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from engine.process.parent import WorkerProcess
from engine.stream import Stream

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}
DEADLINE_SECONDS = 60.0


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an async test two tests, in which nothing may go wrong where only the event loop sees it.

    That on uvloop, as in a server, always runs; that on asyncio's own loop with `rounds`.
    """

    def run(*, loop: Any, **given: Any) -> None:
        complaints: list[Any] = []
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.get_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
            runner.run(test(**given))
        assert complaints == []

    own = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    run.pytestmark = list(getattr(test, "pytestmark", []))
    others = pytest.param(asyncio.new_event_loop, marks=pytest.mark.rounds)
    return pytest.mark.parametrize("loop", [others, uvloop.new_event_loop], ids=["asyncio", "uvloop"])(run)


def begun_together(*scenarios: Callable[[], Coroutine[Any, Any, None]]) -> Any:
    """A fixture with a task of each scenario: they do little but wait, so they wait at the same time."""

    @pytest.fixture(scope="module")
    async def tasks() -> AsyncIterator[dict[Any, asyncio.Task[None]]]:
        begun = {scenario: asyncio.create_task(scenario()) for scenario in scenarios}
        yield begun
        for task in begun.values():
            task.cancel()
        await asyncio.gather(*begun.values(), return_exceptions=True)

    return tasks


async def start(
    service: str = "well:open_service", report: Callable[[str, float], None] | None = None, **arguments: Any
) -> WorkerProcess:
    environment = ENVIRONMENT | arguments.pop("environment", {})
    return await WorkerProcess.start(
        f"misbehaving.{service}", b"/models/x", report or (lambda *_: None), environment=environment, **arguments
    )


@asynccontextmanager
async def worker(service: str = "well:open_service", **arguments: Any) -> AsyncIterator[WorkerProcess]:
    """A running worker, gone at the end."""
    started = await start(service, **arguments)
    try:
        yield started
    finally:
        started.terminate()
        await asyncio.wait_for(started.died.wait(), DEADLINE_SECONDS)


def job_of(running: WorkerProcess, payload: bytes) -> Stream[Any]:
    """A job of it, as a stream."""
    events: Stream[Any] = Stream()

    async def make() -> None:
        failure: Exception | None = None
        try:
            await running.run(payload, lambda event: events.put(msgspec.msgpack.decode(event)))
        except Exception as error:  # noqa: BLE001  # raised where it is read
            failure = error
        events.finish(failure)

    making = asyncio.create_task(make())

    def abort() -> asyncio.Future[None]:
        making.cancel()
        return making

    events.abort = abort
    return events


async def collect(running: WorkerProcess, payload: bytes) -> list[Any]:
    return [event async for event in job_of(running, payload)]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go round until `condition` holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def numbers(end: int) -> list[bytes]:
    """What a job of `well` says."""
    return [b"%d" % number for number in range(end)]


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        pid_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pid_fd], [], [], DEADLINE_SECONDS)[0]
    finally:
        os.close(pid_fd)

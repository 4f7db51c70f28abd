"""The parent's half of a worker: starts the child, runs jobs in it, sees its death, ends it.

Knows nothing of what the jobs are; how many may run at once, and what follows a death, is for whoever starts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self

from engine.errors import (
    EngineError,
    GenerationError,
    LoadError,
    NotStartedError,
    OverloadedError,
    RequestError,
    engine_died,
)
from engine.stall import Guard, Patience
from engine.worker.channel import Channel
from engine.worker.frames import MAX_FRAME_BYTES, FrameError
from engine.worker.job import Job
from engine.worker.messages import (
    Cancel,
    Done,
    Event,
    Failed,
    Load,
    LoadFailed,
    Loading,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Submit,
    ToParent,
)
from engine.worker.spawn import spawn

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import AsyncGenerator, Callable, Mapping

_log = logging.getLogger("hearth.worker")

CANCEL_SECONDS = 10.0
# From SIGKILL to the end of a child: a GPU's driver may take its time.
_END_SECONDS = 5.0
# From the end of its socket to the end of a child, which has nothing left to do.
_EXIT_SECONDS = 2.0
# Of one job. Past that the child waits until the job's reader goes on, and so do the other jobs: never in practice.
_MOST_UNREAD_BYTES = MAX_FRAME_BYTES


class WorkerDiedError(Exception):
    """The child ended while it loaded. `exit_status` as in `subprocess`: negative is the signal that killed it."""

    def __init__(self, exit_status: int | None) -> None:
        if exit_status is not None and exit_status < 0:
            how = f"was killed by {signal.Signals(-exit_status).name} (SIGKILL: often for want of memory)"
        else:
            how = f"ended with exit status {exit_status}"
        super().__init__(f"The worker process {how} while it loaded the model. Its own log lines above say more.")
        self.exit_status = exit_status


class WorkerProcess:
    """A loaded model in a child process. Made by `start`; belongs to the event loop that started it.

    `died` is set when the process is gone, `exit_status` (as in `subprocess`) is known by then, unless not even a kill
    ends it. However it ends, every open `run` gets `EngineDiedError` at once.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], end: socket.socket, pid_fd: int, patience: Patience | None
    ) -> None:
        self.pid = child.pid
        self.info = b""
        self.died = asyncio.Event()
        self.exit_status: int | None = None
        self._child = child
        self._pid_fd = pid_fd
        self._jobs: dict[int, Job] = {}
        self._numbers = count(1)
        self._startup: asyncio.Queue[Loading | Ready | LoadFailed | None] = asyncio.Queue()
        self._accepts_jobs = True
        self._overdue: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pid_fd, self._on_exit)
        self._channel = Channel(end, self._on_message, self._on_lost)
        self._pong = asyncio.Event()
        self._guard = Guard(patience, lambda: [self.pid], self._on_hang)

    @classmethod
    async def start(  # noqa: PLR0913  # what a start depends on
        cls,
        service: str,
        options: bytes,
        report: Callable[[str, float], None],
        *,
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
        patience: Patience | None = None,
    ) -> Self:
        """Start a child, have it load `service` ("module:function", see service.py: `Open`), return when it is ready.

        `nice` is added to its priority once it is ready: beside busy models a load would take minutes. A child that
        hangs for longer than `patience` (engine/stall.py) is killed, now and later. Raises `LoadError` if the service
        refuses, `WorkerDiedError` if the child ends. Cancelling kills the child. The kernel kills it too when the
        calling thread ends, so that must be one that lives as long as the server.
        """
        worker = cls(*spawn(service, environment or {}), patience)
        try:
            worker._guard.begin()
            worker._channel.send(Load(service, options))
            worker.info = await worker._loaded(report)
            worker._guard.expect(worker._answer)
            worker._give_way(nice)
        except BaseException:
            worker.terminate()
            await worker._dead(_END_SECONDS)
            raise
        return worker

    async def run(self, payload: bytes) -> AsyncGenerator[bytes, None]:
        """Submit a job and yield its events; the end of the generator is the job's.

        Raises what the service refused or failed it with (`RequestError`, `OverloadedError`, `GenerationError`), or
        `EngineDiedError`. Closing it cancels the job and returns when the child has let go of it, or after 10 s.
        """
        if not self._accepts_jobs:
            raise engine_died(NotStartedError)
        number, job = next(self._numbers), Job()
        try:
            self._channel.send(Submit(number, payload))
        except FrameError as error:
            raise RequestError("The request is too large for the model. Send a smaller one.") from error
        self._jobs[number] = job
        try:
            while (event := await job.next()) is not None:
                self._go_on()
                yield event
        finally:
            if not job.ended.is_set():
                await self._withdraw(number, job)

    async def shutdown(self, within_seconds: float = _END_SECONDS) -> None:
        """Have the child end by itself, kill it if it has not after `within_seconds`. Returns when it is gone."""
        self._accepts_jobs = False
        self._guard.end()
        try:
            self._channel.send(Shutdown())
            self._channel.resume()
            await self._dead(within_seconds)
        finally:
            self.terminate()
        if not await self._dead(_END_SECONDS):
            _log.error("Worker %d does not end, although it was killed: its device may hang.", self.pid)

    def terminate(self) -> None:
        """Kill the child and what it has started, at once. Safe to call at any time."""
        if self.exit_status is None:  # until then nobody else can have its number
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _answer(self) -> None:
        """Ask the child whether it lives. While it waits for us to read on, it does."""
        if self._channel.paused:
            return
        self._pong.clear()
        self._channel.send(Ping())
        await self._pong.wait()

    def _on_hang(self, how: str) -> None:
        _log.error("Worker %d hangs and is killed: %s.", self.pid, how)
        self.terminate()
        self._fail_jobs()
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = self._loop.call_later(_END_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """Not even a kill ends it: its successor must not wait for that."""
        _log.error("Worker %d does not end, although it was killed: its device may hang.", self.pid)
        self._startup.put_nowait(None)
        self.died.set()

    def _give_way(self, nice: int) -> None:
        """Lower the priority of all its threads. It may be gone by now, which is told in another way."""
        with suppress(OSError):
            for thread in Path(f"/proc/{self.pid}/task").iterdir() if nice else ():
                number = int(thread.name)
                os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number) + nice)

    async def _loaded(self, report: Callable[[str, float], None]) -> bytes:
        while (message := await self._startup.get()) is not None:
            if isinstance(message, Ready):
                return message.info
            if isinstance(message, LoadFailed):
                raise LoadError(message.message)
            report(message.phase, message.progress)
        raise WorkerDiedError(self.exit_status)

    async def _dead(self, within_seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self.died.wait()
        return self.died.is_set()

    async def _withdraw(self, number: int, job: Job) -> None:
        job.discard()
        self._go_on()
        self._channel.send(Cancel(number))
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await job.ended.wait()
        except TimeoutError:
            _log.warning("Worker %d has not let go of a cancelled job within %d s.", self.pid, CANCEL_SECONDS)

    def _go_on(self) -> None:
        """Read on, unless somebody's unread events fill their share of memory."""
        if all(job.unread_bytes < _MOST_UNREAD_BYTES for job in self._jobs.values()):
            self._channel.resume()

    def _on_message(self, message: ToParent) -> None:
        if isinstance(message, Event):
            job = self._jobs.get(message.job)
            if job is not None:
                job.add(message.payload)
                if job.unread_bytes >= _MOST_UNREAD_BYTES and self._accepts_jobs:
                    self._channel.pause()
                    self._pong.set()
        elif isinstance(message, Done | Failed):
            job = self._jobs.pop(message.job, None)
            if job is not None:
                job.end(_error(message) if isinstance(message, Failed) else None)
        elif isinstance(message, Pong):
            self._pong.set()
        else:
            self._startup.put_nowait(message)

    def _on_lost(self, reason: str | None) -> None:
        """Nothing can be said or heard any more: without a `reason` the child is about to end by itself."""
        if reason is not None:
            _log.error("Worker %d is killed: %s. Something in it writes to the socket of the worker.", self.pid, reason)
            self.terminate()
        elif self.exit_status is None:
            self._overdue = self._loop.call_later(_EXIT_SECONDS, self.terminate)
        self._fail_jobs()

    def _on_exit(self) -> None:
        """The process is gone, and still there to be reaped: until then its number, and its group's, is its own."""
        self._guard.end()
        self.terminate()
        self._channel.drain()
        self._channel.close()
        self.exit_status = self._child.wait()
        self._loop.remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        if self._overdue is not None:
            self._overdue.cancel()
        self._fail_jobs()
        self._startup.put_nowait(None)
        self.died.set()

    def _fail_jobs(self) -> None:
        self._accepts_jobs = False
        for job in self._jobs.values():
            job.end(engine_died(), at_once=True)
        self._jobs.clear()


def _error(failed: Failed) -> EngineError:
    if failed.kind == "request":
        return RequestError(failed.message, param=failed.param)
    if failed.kind == "overloaded":
        return OverloadedError(failed.message, retry_after_seconds=failed.retry_after_seconds or 1)
    return GenerationError(failed.message)

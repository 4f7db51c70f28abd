"""The parent's half of a worker: starts the child, runs jobs in it, sees its death, ends it.

Knows nothing of what the jobs are; how many may run at once, and what follows a death, is for whoever starts it.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Self

from engine.errors import (
    EngineError,
    GenerationError,
    LoadError,
    NotStartedError,
    OverloadedError,
    RequestError,
    engine_died,
)
from engine.process.protocol import (
    MAX_FRAME_BYTES,
    Cancel,
    Done,
    Event,
    Failed,
    FrameError,
    FrameReader,
    Load,
    LoadFailed,
    Loading,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Submit,
    ToChild,
    ToParent,
    to_frame,
)
from engine.process.watchdog import Guard, Patience

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
        hangs for longer than `patience` (watchdog.py) is killed, now and later. Raises `LoadError` if the service
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

    async def _withdraw(self, number: int, job: "Job") -> None:
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


_CHUNK_BYTES = 2**18
# More than a socket's buffer holds. Somebody who inherited the child's end must not keep us here.
_MOST_LAST_READS = 64


class Channel:
    """Calls `on_message` for each message, and `on_lost` once when no more will come, but not after `close`.

    The argument of `on_lost` is None when the other side closed, else what is wrong about the bytes that came.
    """

    def __init__(
        self, end: socket.socket, on_message: Callable[[ToParent], None], on_lost: Callable[[str | None], None]
    ) -> None:
        end.setblocking(False)  # noqa: FBT003  # positional only
        self._end = end
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[ToParent] = FrameReader(ToParent)
        self._unsent = bytearray()
        self._reading = False
        self.resume()

    def send(self, message: ToChild) -> None:
        """Send when the child reads; what it has not taken in waits here. Raises `FrameError` for one too long."""
        frame = to_frame(message)
        if self._end.fileno() < 0:
            return
        waiting = bool(self._unsent)
        self._unsent += frame
        if not waiting:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._end.fileno(), self._write)

    def pause(self) -> None:
        """Read no more, so that the child waits, until `resume`."""
        if self._reading:
            self._loop.remove_reader(self._end.fileno())
            self._reading = False

    def resume(self) -> None:
        if not self._reading and self._end.fileno() >= 0:
            self._loop.add_reader(self._end.fileno(), self._read)
            self._reading = True

    @property
    def paused(self) -> bool:
        """Whether what the child says is not listened to."""
        return not self._reading

    def drain(self) -> None:
        """Read what a dead child has left."""
        for _ in range(_MOST_LAST_READS):
            if not self._read():
                return

    def close(self) -> None:
        """Let go of the socket. Safe to call twice."""
        if self._end.fileno() < 0:
            return
        self.pause()
        self._loop.remove_writer(self._end.fileno())
        self._unsent.clear()
        self._end.close()

    def _read(self) -> bool:
        """Whether there may be more."""
        if self._end.fileno() < 0:
            return False
        try:
            data = self._end.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # it was killed with bytes of ours unread
            data = b""
        if not data:
            self._lose(None)
            return False
        self._reader.feed(data)
        try:
            while (message := self._reader.next()) is not None:
                self._on_message(message)
        except FrameError as error:
            self._lose(str(error))
            return False
        return True

    def _write(self) -> None:
        try:
            sent = self._end.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # nobody is there to read it; reading tells that
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._end.fileno())

    def _lose(self, reason: str | None) -> None:
        self.close()
        self._on_lost(reason)


class Job:
    """Filled by the process's channel, read by one `run`."""

    def __init__(self) -> None:
        self.unread_bytes = 0
        self.ended = asyncio.Event()
        self._unread: deque[bytes] = deque()
        self._error: EngineError | None = None
        self._changed = asyncio.Event()
        self._discarding = False

    def add(self, payload: bytes) -> None:
        """Keep an event until it is read."""
        if not self._discarding:
            self._unread.append(payload)
            self.unread_bytes += len(payload)
            self._changed.set()

    def end(self, error: EngineError | None = None, *, at_once: bool = False) -> None:
        """No more will come. `at_once`: what is unread is not worth reading any more."""
        if at_once:
            self._forget()
        self._error = error
        self.ended.set()
        self._changed.set()

    def discard(self) -> None:
        """Nobody reads any more."""
        self._discarding = True
        self._forget()

    async def next(self) -> bytes | None:
        """Return the next event, None after the last; raises what ended the job, after its events."""
        while not self._unread:
            if self.ended.is_set():
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        payload = self._unread.popleft()
        self.unread_bytes -= len(payload)
        return payload

    def _forget(self) -> None:
        self._unread.clear()
        self.unread_bytes = 0


# oneDNN keeps what it has prepared for a size of its work, 1024 of them if let, at up to a MiB each: enough for all the
# layers of a diffusion model, and no more.
_DEFAULTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


def spawn(service: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the child; return it, our end of the socket, and a descriptor that is readable when it ends."""
    # The child finds modules where we find them, and never in the folder that happens to be the current one.
    path = [environment.get("PYTHONPATH", ""), *(str(Path(entry).absolute()) for entry in sys.path)]
    # Our settings are not for a process that reads other people's files: one holds the database's password.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    variables = {**_DEFAULTS, **inherited, **environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        child = subprocess.Popen(
            # The service is named for whoever looks at the processes; the child is told by a message
            [sys.executable, "-P", "-m", "engine.process.child", str(theirs.fileno()), service],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=variables,
            process_group=0,  # Ctrl-C in a terminal reaches the server only
        )
        undo.callback(child.wait)
        undo.callback(child.kill)
        pid_fd = os.pidfd_open(child.pid)
        undo.pop_all()
    return child, ours, pid_fd

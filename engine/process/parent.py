"""The server's half of a worker: starts the child, runs jobs in it, notices its death, ends it; `WorkerBackend`.

The backends (backends/diffusers, backends/tts) define jobs; the pool decides what follows a death.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.admission import Admission, Room
from engine.backends import WORKER_ENVIRONMENT, Backend
from engine.errors import GenerationError, LoadError, NotStartedError, RequestError, StartError, engine_died
from engine.process import protocol
from engine.process.protocol import FrameError, FrameReader, to_frame
from engine.process.watchdog import Guard, Patience
from engine.types import Report

_log = logging.getLogger("hearth.worker")

CANCEL_SECONDS = 10.0
# From SIGKILL to the end of a child: a GPU's driver may take its time.
_END_SECONDS = 5.0
# From the end of its socket to the end of a child that has nothing left to do.
_EXIT_SECONDS = 2.0
# oneDNN caches what it prepares for each size of its work, by default 1024 of up to a MiB. This is enough for all
# layers of a diffusion model.
_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
_CHUNK_BYTES = 2**18
# More than a socket's buffer holds. A process that inherited the child's end must not keep us here.
_MOST_LAST_READS = 64
# A step of a tiny chat model must not wait for the rest: on a CPU the kernel lets chat go first.
NICE_ON_CPU = 10


def give_way(pid: int, nice: int) -> None:
    """Lower the priority of all threads of a process, if it has not ended."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir() if nice else ():
            number = int(thread.name)
            os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number) + nice)


class WorkerDiedError(StartError):
    """The child ended while it loaded. `exit_status` as in `subprocess`: negative is the signal that killed it."""

    def __init__(self, exit_status: int | None) -> None:
        if exit_status is not None and exit_status < 0:
            how = f"was killed by {signal.Signals(-exit_status).name} (SIGKILL: often for lack of memory)"
        else:
            how = f"ended with exit status {exit_status}"
        super().__init__(f"The worker process {how} while it loaded the model. Its own lines in the log say more.")
        self.exit_status = exit_status


class Channel:
    """Calls `on_message` for each message, and `on_lost` once when no more will come, but not after `close`.

    The argument of `on_lost` is None if the other side closed, else what is wrong with the bytes that came.
    """

    def __init__(
        self,
        end: socket.socket,
        on_message: Callable[[protocol.FromChild], None],
        on_lost: Callable[[str | None], None],
    ) -> None:
        end.setblocking(False)  # noqa: FBT003  # positional only
        self._end = end
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[protocol.FromChild] = FrameReader(protocol.FromChild)
        self._unsent = bytearray()
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: protocol.ToChild[Any]) -> None:
        """Send when the child reads; the rest waits here. Raises `FrameError` for a message that is too long."""
        frame = to_frame(message)
        if self._end.fileno() < 0:
            return
        self._unsent += frame
        self._write()

    def drain(self) -> None:
        """Read what a dead child has left."""
        for _ in range(_MOST_LAST_READS):
            if not self._read():
                return

    def close(self) -> None:
        """Safe to call twice."""
        if self._end.fileno() < 0:
            return
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())
        self._unsent.clear()
        self._end.close()

    def _read(self) -> bool:
        """Read once. Returns whether there may be more."""
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
        try:
            for message in self._reader.read(data):
                self._on_message(message)
        except FrameError as error:
            self._lose(str(error))
            return False
        return True

    def _write(self) -> None:
        try:
            sent = self._end.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other end is closed, which reading reports
            sent = len(self._unsent)
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._end.fileno(), self._write)
        else:
            self._loop.remove_writer(self._end.fileno())

    def _lose(self, reason: str | None) -> None:
        self.close()
        self._on_lost(reason)


@dataclass(slots=True)
class _Job:
    """A job that the child has not ended. `take` gets its events; None once they are not wanted."""

    take: Callable[[msgspec.Raw], None] | None
    ended: asyncio.Future[None]

    def event(self, payload: msgspec.Raw) -> None:
        if self.take is None:
            return
        try:
            self.take(payload)
        except Exception as error:  # noqa: BLE001  # this job's alone; `run` raises it
            self.end(error)
            self.take = None

    def end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None or self.take is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as read: `run` may be cancelled at this moment


class WorkerProcess:
    """A loaded model in a child process. Made by `start`; belongs to the event loop that started it.

    `died` is set when the process has ended; then `exit_status` (as in `subprocess`) is known, unless not even a kill
    has ended it. However it ends, every open `run` gets `EngineDiedError` at once.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        end: socket.socket,
        pid_fd: int,
        patience: Patience | None,
        folder: tempfile.TemporaryDirectory[str],
    ) -> None:
        self.pid = child.pid
        self.died = asyncio.Event()
        self.exit_status: int | None = None
        self._child = child
        self._pid_fd, self._folder = pid_fd, folder
        self._jobs: dict[int, _Job] = {}
        self._numbers = count(1)
        self._startup: asyncio.Queue[protocol.FromChild | None] = asyncio.Queue()
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
        options: object,
        report: Report,
        *,
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
        patience: Patience | None = None,
    ) -> Self:
        """Start a child, have it load `service` ("module:function", see `protocol.Load`), return when it is ready.

        `nice` is added to its niceness when it is ready, not before: else a load beside busy models would take minutes.
        A child that hangs for longer than `patience` (watchdog.py) is killed, now and later. Raises `LoadError` if the
        service refuses, `WorkerDiedError` if the child ends. Cancelling kills the child. The kernel also kills it when
        the calling thread ends, so that thread must live as long as the server.
        """
        # Its files are removed with it. If we are killed too, the next server removes the folder (processes.prepare).
        folder = tempfile.TemporaryDirectory(prefix=f"hearth-{os.getpid()}-worker-", ignore_cleanup_errors=True)
        worker = cls(*_spawn(service, {**(environment or {}), "TMPDIR": folder.name}), patience, folder)
        try:
            worker._guard.watch()
            worker._channel.send(protocol.Load(service, options))
            await worker._loaded(report)
            worker._guard.watch(worker._answer)
            give_way(worker.pid, nice)
        except BaseException:
            worker.terminate()
            await worker._dead(_END_SECONDS)
            raise
        return worker

    async def run(self, payload: object, take: Callable[[msgspec.Raw], None]) -> None:
        """Run a job to its end, and call `take` with each of its events, in order.

        Raises the service's error (`RequestError`, `OverloadedError`, `GenerationError`), `EngineDiedError`, or what
        `take` raised, which cancels the job. Cancelling cancels the job too, and returns when the child has dropped it,
        or after 10 s.
        """
        if not self._accepts_jobs:
            raise engine_died(NotStartedError)
        number = next(self._numbers)
        try:
            self._channel.send(protocol.Submit(number, payload))
        except FrameError as error:
            raise RequestError("The request is too large for the model. Send a smaller one.") from error
        job = self._jobs[number] = _Job(take, self._loop.create_future())
        try:
            await job.ended
        finally:
            if number in self._jobs:
                await self._withdraw(number, job)

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    async def shutdown(self, within_seconds: float = _END_SECONDS) -> None:
        """Have the child end by itself; kill it after `within_seconds`. Returns when it has ended."""
        self._accepts_jobs = False
        self._guard.end()
        try:
            self._channel.send(protocol.Shutdown())
            await self._dead(within_seconds)
        finally:
            self.terminate()
        if not await self._dead(_END_SECONDS):
            self._log_undead()

    def terminate(self) -> None:
        """Kill the child and what it has started, at once. Safe to call at any time."""
        if self.exit_status is None:  # until then no other process can have its number
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _answer(self) -> None:
        self._pong.clear()
        self._channel.send(protocol.Ping())
        await self._pong.wait()

    def _on_hang(self, how: str) -> None:
        _log.error("Worker %d does not respond and is killed: %s.", self.pid, how)
        self.terminate()
        self._fail_jobs()
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = self._loop.call_later(_END_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """Not even a kill ends the child: its successor must not wait for that."""
        self._log_undead()
        self._startup.put_nowait(None)
        self.died.set()

    def _log_undead(self) -> None:
        _log.error("Worker %d does not end, although it was killed: its device may hang.", self.pid)

    async def _loaded(self, report: Report) -> None:
        while (message := await self._startup.get()) is not None:
            if isinstance(message, protocol.Ready):
                return
            if isinstance(message, protocol.LoadFailed):
                raise (StartError if message.passing else LoadError)(message.message)
            if isinstance(message, protocol.Loading):
                report(message.phase, message.progress)
        raise WorkerDiedError(self.exit_status)

    async def _dead(self, within_seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self.died.wait()
        return self.died.is_set()

    async def _withdraw(self, number: int, job: _Job) -> None:
        job.take, job.ended = None, self._loop.create_future()
        self._channel.send(protocol.Cancel(number))
        if not (await asyncio.wait({job.ended}, timeout=CANCEL_SECONDS))[0]:
            _log.warning("Worker %d did not end a cancelled job within %d s.", self.pid, CANCEL_SECONDS)

    def _on_message(self, message: protocol.FromChild) -> None:
        if isinstance(message, protocol.Event):
            if message.job in self._jobs:
                self._jobs[message.job].event(message.payload)
        elif isinstance(message, protocol.Done | protocol.Failed):
            if message.job in self._jobs:
                self._jobs.pop(message.job).end(message.error() if isinstance(message, protocol.Failed) else None)
        elif isinstance(message, protocol.Pong):
            self._pong.set()
        else:
            self._startup.put_nowait(message)

    def _on_lost(self, reason: str | None) -> None:
        """The socket is closed: without a `reason` the child is about to end by itself."""
        if reason is not None:
            _log.error("Worker %d is killed: %s. Something in it writes to the socket of the worker.", self.pid, reason)
            self.terminate()
        elif self.exit_status is None:
            self._overdue = self._loop.call_later(_EXIT_SECONDS, self.terminate)
        self._fail_jobs()

    def _on_exit(self) -> None:
        """Reap the ended process: until then its number, and its group's, stays its own."""
        self._guard.end()
        self.terminate()
        self._channel.drain()
        self._channel.close()
        self.exit_status = self._child.wait()
        self._folder.cleanup()
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
            job.end(engine_died())
        self._jobs.clear()


async def start_worker(  # noqa: PLR0913  # what a start depends on
    service: str, options: object, report: Report, *, threads: int, on_cpu: bool, patience: Patience | None
) -> WorkerProcess:
    """Start a worker that loads `service`. Raises `LoadError` if that can never work, `StartError` if it may."""
    return await WorkerProcess.start(
        service,
        options,
        report,
        environment={**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
        nice=NICE_ON_CPU if on_cpu else 0,
        patience=patience,
    )


def _spawn(service: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the child; return it, our end of the socket, and a descriptor that is readable when it ends."""
    # The child finds modules where we do, and never in the current folder.
    path = [environment.get("PYTHONPATH", ""), *(str(Path(entry).absolute()) for entry in sys.path)]
    # Our settings are not for a process that reads clients' files: one is the database's password.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    variables = {**_ENVIRONMENT, **inherited, **environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        child = subprocess.Popen(
            # The argument is for people who list processes; the child gets the service in a message
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


class WorkerBackend(Backend):
    """What backends with a worker have in common: a queue in front, one life, a stream per request."""

    def __init__(self, worker: WorkerProcess, room: Room) -> None:
        self.worker = worker
        self.died = worker.died
        self.admission = Admission(room)
        self._watch = asyncio.create_task(self._watch_worker())

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.worker.pid,)

    async def shutdown(self) -> None:
        self._watch.cancel()
        await self.worker.shutdown()

    def terminate(self) -> None:
        self._watch.cancel()
        self.worker.terminate()

    async def run(
        self, job: msgspec.Struct, take: Callable[[msgspec.Raw], None], *, within_seconds: float, advice: str
    ) -> None:
        """Run a job (`WorkerProcess.run`). Raises `GenerationError` with `advice` after `within_seconds`."""
        try:
            async with asyncio.timeout(within_seconds):
                await self.worker.run(job, take)
        except TimeoutError as error:
            raise GenerationError(f"It took longer than {within_seconds:g} s and was given up. {advice}") from error

    async def _watch_worker(self) -> None:
        await self.worker.died.wait()
        self.admission.close()

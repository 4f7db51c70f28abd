"""Runs in the child, `python -m engine.process.child FD SERVICE`: loads a service by name, drives it until told to end.

The service has the model and the queue. The child ends with its parent, however that ends.
"""

import ctypes
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import EngineError, GenerationError, LoadError, StartError
from engine.placement.hardware import FIRST_VICTIM, MODEL_VICTIM, offer_to_oom_killer
from engine.process import protocol
from engine.process.protocol import FrameError, FrameReader, Service, ShutdownRequested, to_frame

_log = logging.getLogger("hearth.worker")

_PROCESS_NAME = "hearth-worker"
_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 2**18
# Objects that imports make stay: collecting garbage among them again and again would take a fifth of the time.
_THRESHOLDS_AT_LOAD = (100_000, 20, 20)


def main() -> None:
    """Serve the socket whose number is the first argument, then end this process."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    offer_to_oom_killer(MODEL_VICTIM)
    _end_with_maker_of(end)  # the socket's end comes too late for one that hangs
    Path("/proc/self/comm").write_text(_PROCESS_NAME, encoding="ascii")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    status = Child(end).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries hang when they clean up a broken device; the kernel frees all that we hold.
    os._exit(status)


def end_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def confine(memory_bytes: int, *more: tuple[int, int]) -> None:
    """Bound this process, which works on what strangers send, and have the kernel choose it first.

    It may have so much memory beside what it has now; `more` are further limits, of `resource`. What its libraries
    print is dropped: it may be what a client has sent, and a loader that finds no memory prints too.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    memory = (resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)
    for kind, most in (memory, (resource.RLIMIT_CORE, 0), *more):
        resource.setrlimit(kind, (most, most))
    offer_to_oom_killer(FIRST_VICTIM)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _end_with_maker_of(end: socket.socket) -> None:
    """Do that, and end now if the starter, which made the socket pair of `end`, has ended already."""
    end_with_starter()
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if os.getppid() != struct.unpack("3i", credentials)[0]:
        os._exit(1)  # it died before the line above


class Child:
    """The loop, and the `Outlet` of its service."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reader: FrameReader[protocol.FromParent] = FrameReader(protocol.FromParent)
        self._asked: protocol.Load[msgspec.Raw] | None = None
        self._service: Service | None = None
        self._open_jobs: set[int] = set()
        self._ending = False

    def run(self) -> int:
        try:
            self._serve(self._load())
        except ShutdownRequested:
            return 0
        except (LoadError, StartError) as error:
            self._send(protocol.LoadFailed(error.message, passing=isinstance(error, StartError)))
        except Exception as error:  # noqa: BLE001  # last resort: a fresh process takes over
            _log_trace("The worker ends, because of", error, with_message=self._service is None)
        return 1

    def _load(self) -> Service:
        while self._asked is None:
            self._take_in(wait=True)
        module, _, name = self._asked.service.partition(":")
        before = gc.get_threshold()
        gc.set_threshold(*_THRESHOLDS_AT_LOAD)
        opened: Service = getattr(importlib.import_module(module), name)(self._asked.options, self, self._report)
        gc.set_threshold(*before)
        # Cycles of the load are collected now; the rest is frozen, so that no job waits for a collection of it.
        gc.collect()
        gc.freeze()
        self._service = opened
        self._send(protocol.Ready())
        return opened

    def _serve(self, service: Service) -> None:
        while True:
            self._take_in(wait=not service.busy)
            if service.busy:
                self._step(service)

    def _step(self, service: Service) -> None:
        try:
            service.step()
        except Exception as error:
            if not isinstance(error, EngineError) and not _is_out_of_memory(error):
                raise
            failure = _as_engine_error(error).with_traceback(None)
        else:
            return
        for job in sorted(self._open_jobs):
            self.failed(job, failure)
            service.cancel(job)
        gc.collect()  # what the trace referred to, above all tensors

    def event(self, job: int, payload: object) -> None:
        if job not in self._open_jobs:
            return
        try:
            self._send(protocol.Event(job, payload))
        except FrameError as error:
            raise GenerationError("The answer is too large to be sent. Ask for a smaller one.") from error

    def done(self, job: int) -> None:
        if job in self._open_jobs:
            self._open_jobs.remove(job)
            self._send(protocol.Done(job))

    def failed(self, job: int, error: EngineError) -> None:
        if job in self._open_jobs:
            self._open_jobs.remove(job)
            self._send(protocol.Failed.of(job, error))

    def poll(self) -> None:
        self._take_in(wait=False)

    def _report(self, phase: str, progress: float) -> None:
        self._send(protocol.Loading(phase, progress))
        self.poll()

    def _take_in(self, *, wait: bool) -> None:
        """Act on all messages that have come. `wait`: at least one."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while not self._ending:
            try:
                data = self._end.recv(_CHUNK_BYTES, flags)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._ending = not data
            for message in self._reader.read(data):
                self._act(message)
                if self._ending:
                    break
            flags = socket.MSG_DONTWAIT
        raise ShutdownRequested

    def _act(self, message: protocol.FromParent) -> None:
        if isinstance(message, protocol.Shutdown):
            self._ending = True
        elif isinstance(message, protocol.Ping):
            self._send(protocol.Pong())
        elif isinstance(message, protocol.Load):
            self._asked = message
        elif isinstance(message, protocol.Submit):
            self._submit(message)
        elif isinstance(message, protocol.Cancel) and message.job in self._open_jobs and self._service is not None:
            self._service.cancel(message.job)

    def _submit(self, message: protocol.Submit[msgspec.Raw]) -> None:
        if self._service is None:
            raise FrameError("a job came before the model was loaded")
        self._open_jobs.add(message.job)
        try:
            self._service.submit(message.job, message.payload)
        except Exception as error:  # noqa: BLE001  # a job that cannot be queued must not end the others
            if not isinstance(error, EngineError):
                _log_trace("A job could not be queued:", error)
            self.failed(message.job, _as_engine_error(error))

    def _send(self, message: protocol.ToParent[Any]) -> None:
        frame = to_frame(message)
        try:
            self._end.sendall(frame)
        except OSError as error:
            self._ending = True
            raise ShutdownRequested from error


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if _is_out_of_memory(error):
        return GenerationError(
            "The model ran out of memory over this request. Try again, or ask for something smaller."
        )
    return GenerationError("The model could not work on this request. Try again; if it fails again, change it.")


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own, torch's by class (CUDA) and by text (CPU), without importing torch."""
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _log_trace(what: str, error: BaseException, *, with_message: bool = False) -> None:
    """Log where it happened. Messages, which may quote a prompt, are left out, but for RuntimeError and OSError."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        said = str(cause) if with_message or isinstance(cause, (RuntimeError, OSError)) else "(message left out)"
        lines = [*traceback.format_tb(cause.__traceback__), f"{type(cause).__name__}: {said}\n", *lines]
        cause = cause.__cause__
    _log.error("%s\n%s", what, "".join(lines).rstrip())


if __name__ == "__main__":
    main()

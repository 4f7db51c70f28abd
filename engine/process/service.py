"""What a model looks like inside a worker, and what it is given there. The loop that drives it is child.py's.

All of it happens on one thread, the child's main thread.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from engine.errors import EngineError


class ShutdownRequested(BaseException):  # like KeyboardInterrupt it is not for `except Exception`
    """The child must end now. Raised by `poll`, and by anything that speaks to a parent that has ended."""


class Outlet(Protocol):
    """How a service answers. Each job ends once, by `done` or `failed`; what is said of it after that is dropped."""

    def event(self, job: int, payload: object) -> None:
        """Give the parent a part of the answer, which msgspec can encode.

        Raises `GenerationError` if it is longer than a frame (64 MiB).
        """

    def done(self, job: int) -> None:
        """The answer is complete, or was cancelled."""

    def failed(self, job: int, error: EngineError) -> None:
        """There will be no answer. The class of `error` says whose fault that is, its message goes to the client."""

    def poll(self) -> None:
        """Take in what came meanwhile; raises `ShutdownRequested`. Call it between the steps of long work.

        `submit` and `cancel` are called from within.
        """


class Service(Protocol):
    """A loaded model that works on any number of jobs, a bounded piece of work at a time."""

    @property
    def info(self) -> object:
        """What `WorkerProcess.info` shows, which msgspec can encode."""

    def submit(self, job: int, payload: msgspec.Raw) -> None:
        """Queue the job, for the service to decode. What raises has not queued it: an `EngineError` is its answer."""

    def cancel(self, job: int) -> None:
        """Drop a job that has not ended. `done` or `failed` is called for it now or in a step to come."""

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do; while not, the child sleeps until a message comes."""

    def step(self) -> None:
        """Do one bounded piece of work for the jobs there are.

        An `EngineError`, or memory running out, fails all jobs (each is cancelled, and its end ignored) and the
        service goes on. Any other exception ends the process.
        """


Report: TypeAlias = Callable[[str, float], None]
Open: TypeAlias = Callable[[msgspec.Raw, Outlet, Report], Service]
"""A service by name: options (encoded), outlet, report(phase, progress from 0 to 1). Raises `LoadError`."""

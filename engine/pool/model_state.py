"""One model of the pool: its state, what that means for requests, and the configuration that is wanted.

The pool (pool.py) changes the state.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.backends import Backend
from engine.config import ModelSpec
from engine.errors import ModelLoadingError, UnavailableError, engine_died
from engine.pool.records import LoadTimes
from engine.types import ModelHealth, ModelStatus

NEXT: dict[ModelStatus, frozenset[ModelStatus]] = {
    "loading": frozenset({"loading", "ready", "failed", "unloaded"}),
    "ready": frozenset({"loading", "failed", "unloaded", "sleeping"}),
    "failed": frozenset({"loading", "unloaded"}),
    "unloaded": frozenset({"unloaded", "loading"}),
    "sleeping": frozenset({"sleeping", "ready", "loading", "failed", "unloaded"}),
}
_log = logging.getLogger("hearth.pool")

_LONGEST_RETRY_SECONDS = 60
_SEE_LOG = "The server's log says why."
_ASK = "Ask your administrator: the server's log says why."

_OUT_OF_MEMORY = (
    "The kernel killed its process for lack of memory: docs/operations.md, 'When memory is short', says what to do."
)

_LONGEST_BACKOFF_SECONDS = 60.0
STEADY_SECONDS = 60.0  # a model that lived this long is loaded again without back-off
_FIRST_LOAD_ATTEMPTS = 3
_MOST_FAILURES = 5
REST_SECONDS = 600.0


@dataclass(slots=True)
class Streak:
    """The failures of one model in a row: starts that failed, and deaths within a minute of being ready."""

    failures: int = 0
    ready_at: float | None = None  # the streak ends if it then lives for a minute
    refused: bool = False  # it can never be loaded as it is configured

    @property
    def verdict(self) -> Literal["again", "rest", "never"]:
        """What to do next.

        A model that was never ready is most likely not configured for this machine. One that was ready may have failed
        because of requests, and must come back by itself when those have passed.
        """
        if self.refused or (self.ready_at is None and self.failures >= _FIRST_LOAD_ATTEMPTS):
            return "never"
        return "rest" if self.failures >= _MOST_FAILURES else "again"

    @property
    def pause_seconds(self) -> float:
        """The back-off before the next try: 0 at first, then 1, 2, 4, 8 s; or a rest."""
        if self.verdict == "rest":
            return REST_SECONDS
        return min(_LONGEST_BACKOFF_SECONDS, 2.0 ** (self.failures - 1)) if self.failures else 0.0


@dataclass(slots=True)
class ModelState:
    """What is known of a model, made in an event loop. Only the pool changes its state; each change calls `changed`."""

    spec: ModelSpec
    status: ModelStatus = "loading"
    phase: str = "queued for loading"
    progress: float = 0.0
    times: LoadTimes = field(default_factory=LoadTimes)
    clock: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)
    since: float = field(init=False)
    backend: Backend | None = None
    leaving: Backend | None = None  # takes no more requests and ends with its last answer
    loads: int = 0
    phases: list[tuple[str, float]] = field(default_factory=list)  # of this load, each with its start
    restarts: int = 0
    died: bool = False  # since it was last ready
    error: str | None = None
    reason: str | None = None
    streak: Streak = field(default_factory=Streak)
    wanted: ModelSpec | None = field(init=False)  # None: it is to end
    stale: asyncio.Event = field(default_factory=asyncio.Event)
    changed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.wanted = self.spec
        self.since = self.clock()
        self.phases.append((self.phase, self.since))

    def want(self, spec: ModelSpec | None) -> None:
        """Take a new configuration, None to end: in place if possible, else by setting `stale`."""
        self.wanted = spec
        if spec is None or needs_another_engine(self.spec, spec) or self.status == "failed":
            self.stale.set()
        else:
            self.spec = spec

    def renew(self) -> bool:
        """Apply the configuration that is wanted now; False if there is none."""
        self.stale.clear()
        if self.wanted is None:
            return False
        self.spec, self.streak = self.wanted, Streak()
        return True

    def enter(self, status: ModelStatus, phase: str) -> None:
        """Change the state. Raises `ValueError` if it cannot follow the present one: a bug of ours."""
        if status not in NEXT[self.status]:
            raise ValueError(f"{self.spec.id}: {status} cannot follow {self.status}")
        self.status, self.phase, self.since = status, phase, self.clock()
        self.progress = 1.0 if status == "ready" else 0.0
        if status == "unloaded":
            self.died = False  # no restart follows before a request
        if status == "loading":
            self.phases = [(phase, self.since)]
        self.changed()

    def load_on(self, phase: str, progress: float) -> None:
        if self.status == "loading":  # else the report comes late
            self.phase, self.progress = phase, progress
            self.phases.append((phase, self.clock()))
            self.changed()

    def remaining_seconds(self) -> float | None:
        """Return how long the load should still take, going by the last one; None if that is not known."""
        if self.status != "loading":
            return None
        phase, began = self.phases[-1]
        return self.times.remaining(self.spec.id, phase, self.clock() - began, again=self.loads > 0)

    def become_ready(self, backend: Backend) -> None:
        if self.status == "loading":  # not after a sleep
            self.times.keep(self.spec.id, self.phases, self.clock(), again=self.loads > 0)
            self.loads += 1
        self.backend = backend
        self.died = False
        self.error = self.reason = None
        self.streak.ready_at = self.clock()
        self.enter("ready", "ready")

    def lose(self, oom_kills: int = 0) -> None:
        """Its process has died. `oom_kills`: how many the kernel has killed for lack of memory since it was ready."""
        self.backend = None
        self.restarts += 1
        self.died = True
        ready_at = self.streak.ready_at
        steady = ready_at is not None and self.clock() - ready_at > STEADY_SECONDS
        self.streak.failures = 0 if steady else self.streak.failures + 1
        self._go_on("restarting after its engine died", oom_kills)

    def refuse(self, error: str) -> None:
        """It cannot be loaded as it is configured. `error` is for the operator only."""
        self.streak.refused = True
        self.error, self.reason = error, f"It cannot be loaded as it is configured. {_SEE_LOG}"
        self.enter("failed", "failed")

    def fail(self, cause: str, oom_kills: int = 0) -> None:
        """Its engine did not start, and may at the next try. `oom_kills`: as in `lose`, since the start began.

        `cause` is one line for the operator only.
        """
        self.streak.failures += 1
        self.error = f"The engine did not start: {cause}"
        self._go_on(f"did not start; trying again in {self.streak.pause_seconds:.0f} s", oom_kills, cause)

    def _go_on(self, phase: str, oom_kills: int, cause: str | None = None) -> None:
        """Load it again, or let it fail: for good, or for a rest."""
        streak = self.streak
        short = f"{_OUT_OF_MEMORY} " if oom_kills else ""
        if oom_kills:
            _log.error("%s: %s", self.spec.id, _OUT_OF_MEMORY)
        if streak.verdict == "again":
            self.reason = short.strip() or None
            self.enter("loading", phase)
            return
        if streak.verdict == "never":
            self.reason = f"{short}Its engine did not start, {streak.failures} times in a row. {_SEE_LOG}"
        else:
            self.reason = (
                f"{short}Its engine failed {streak.failures} times in a row: it did not start, or died within a "
                f"minute. It is tried again after {REST_SECONDS / 60:.0f} minutes, or by `hearth reload`. {_SEE_LOG}"
            )
        self.error = self.reason if cause is None else f"{self.reason.removesuffix(_SEE_LOG)}The last time: {cause}"
        _log.error("%s: %s", self.spec.id, self.error)
        self.enter("failed", "failed")

    @property
    def given_up(self) -> bool:
        """Whether it will not be ready again without a change by somebody."""
        return self.status == "failed" and self.streak.verdict == "never" and not self.stale.is_set()

    def reviving(self) -> bool:
        """Whether its process died and it will be loaded again."""
        died = self.backend is not None and self.backend.died.is_set()
        return self.wanted is not None and (died or (self.died and self.status == "loading"))

    def unavailable(self) -> UnavailableError:
        """Return the error that says why no request gets it, and for how long."""
        if self.status == "failed" and self.streak.verdict == "never":
            return UnavailableError(f"This model could not be loaded. {_ASK}", retry_after_seconds=None)
        if self.status == "failed":
            rest_seconds = max(1, math.ceil(self.since + REST_SECONDS - self.clock()))
            return UnavailableError(
                f"This model failed {self.streak.failures} times in a row and is started again in "
                f"{rest_seconds} s. {_ASK}",
                retry_after_seconds=rest_seconds,
            )
        if self.died or self.backend is not None:
            return engine_died()
        remaining = self.remaining_seconds()
        if remaining is None:
            remaining = 5 if self.progress >= 0.5 else 10
        return ModelLoadingError(
            f"This model is still being loaded ({self.phase}). Try again in a few seconds.",
            retry_after_seconds=min(max(math.ceil(remaining), 1), _LONGEST_RETRY_SECONDS),
        )

    def health(self) -> ModelHealth:
        remaining = self.remaining_seconds()
        return ModelHealth(
            id=self.spec.id,
            status=self.status,
            phase=self.phase,
            progress=self.progress,
            elapsed_seconds=round(self.clock() - self.since, 1),
            remaining_seconds=None if remaining is None else round(remaining, 1),
            restarts=self.restarts,
            error=self.error,
            reason=self.reason,
        )


def needs_another_engine(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether a model has to be loaded again for its entry to take effect."""
    in_place = {"aliases", "tier", "owned_by", "description"}
    return old.model_dump(exclude=in_place) != new.model_dump(exclude=in_place)

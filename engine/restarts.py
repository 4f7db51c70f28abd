"""When a model that fails is tried again: at once, after a pause, after a long rest, or never. No clock of its own."""

from __future__ import annotations

from typing import Literal

_LONGEST_BACKOFF_SECONDS = 60.0
STEADY_SECONDS = 60.0  # a model that lived this long starts over with no back-off
_FIRST_LOAD_ATTEMPTS = 3
_MOST_FAILURES = 5
REST_SECONDS = 600.0

Verdict = Literal["again", "rest", "never"]


class Streak:
    """The failures of one model in a row: starts that failed, and deaths within a minute of being ready."""

    def __init__(self) -> None:
        self.failures = 0
        self._ready_at: float | None = None
        self._refused = False

    def refused(self) -> None:
        """It can never be loaded as it is configured."""
        self._refused = True

    def start_failed(self) -> None:
        """Its engine did not start."""
        self.failures += 1

    def ready(self, now_seconds: float) -> None:
        """It answers now. Only time tells whether that ends the streak."""
        self._ready_at = now_seconds

    def died(self, now_seconds: float) -> None:
        """Its engine is gone."""
        ready_at = now_seconds if self._ready_at is None else self._ready_at
        self.failures = 0 if now_seconds - ready_at > STEADY_SECONDS else self.failures + 1

    @property
    def verdict(self) -> Verdict:
        """What to do next.

        A model that was never ready is most likely not configured for this machine. One that was can be brought down by
        what is sent to it, and must come back by itself when that has passed.
        """
        if self._refused or (self._ready_at is None and self.failures >= _FIRST_LOAD_ATTEMPTS):
            return "never"
        return "rest" if self.failures >= _MOST_FAILURES else "again"

    @property
    def pause_seconds(self) -> float:
        """How long to wait before it is tried again."""
        return REST_SECONDS if self.verdict == "rest" else backoff_seconds(self.failures)


def backoff_seconds(failures: int) -> float:
    """0 at first, then 1, 2, 4 ... up to a minute."""
    return 0.0 if failures == 0 else min(_LONGEST_BACKOFF_SECONDS, 2.0 ** (failures - 1))

"""What each model has got done in the last minute, for whoever looks at this moment. Prometheus keeps the rest."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SPAN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts of answers that have ended."""

    tokens: int = 0
    images: int = 0
    audio_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.images + other.images, self.audio_seconds + other.audio_seconds)


class LastMinute:
    """One entry per model and second at the most, however many answers end in it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._done: dict[str, deque[tuple[int, Work]]] = {}

    @property
    def seconds(self) -> float:
        """How long the time is that `of` tells of: a minute, or since the start."""
        return min(SPAN_SECONDS, max(self._clock() - self._began_at, 1.0))

    def add(self, model: str, work: Work) -> None:
        """Count an answer that has ended."""
        second, done = int(self._clock()), self._done.setdefault(model, deque())
        if done and done[-1][0] == second:
            work += done.pop()[1]
        done.append((second, work))
        self._forget(done)

    def of(self, model: str) -> Work:
        """Return what it has got done."""
        done = self._done.get(model, deque())
        self._forget(done)
        return sum((work for _, work in done), Work())

    def _forget(self, done: deque[tuple[int, Work]]) -> None:
        oldest = int(self._clock()) - SPAN_SECONDS
        while done and done[0][0] <= oldest:
            done.popleft()

"""How long a struggling hub is waited for: again after a pause that grows, or after the one that it asks for."""

from __future__ import annotations

import email.utils
import time
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from engine.hub.errors import StoppedError

if TYPE_CHECKING:
    from collections.abc import Mapping

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Patience:
    """`attempts` in a row may bring nothing; each byte that arrives makes them start anew."""

    attempts: int = 6
    first_pause_seconds: float = 1
    longest_pause_seconds: float = 30
    longest_asked_seconds: float = 300
    """A hub that asks for more is told of, not waited for."""
    stop: Event = field(default_factory=Event)

    def pause(self, failures: int, asked_seconds: float | None) -> bool:
        """Wait before the next attempt; False if there should be none. Raises `StoppedError`."""
        if failures >= self.attempts or (asked_seconds or 0) > self.longest_asked_seconds:
            return False
        grown = min(self.first_pause_seconds * 2 ** (failures - 1), self.longest_pause_seconds)
        if self.stop.wait(grown if asked_seconds is None else asked_seconds):
            raise StoppedError("Stopped.")
        return True


def asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds of a `Retry-After` header, which may be a number or a date; None if there is none."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None

"""The jobs of `bench many` and `bench soak`: loads in which answers may fail, and what became of each request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from benchmarks.chat_job import ChatJob
from benchmarks.figures import milliseconds, percentile

if TYPE_CHECKING:
    from benchmarks.figures import Figures
    from benchmarks.http_answers import Answer

_SHOWN = 3
_MAX_SENTENCES = 8
_LEAVES_SECONDS = 0.5


class RoughJob(msgspec.Struct, frozen=True):
    """A load that does not end with the first answer that is no success.

    With `seconds` it is a closed loop of `streams` for so long, streamed and plain in turn, in which the part
    `leaving` of the clients hangs up in the midst of the answer. Without, it is one burst: `streams` streamed requests
    at the same moment, each over a connection of its own.
    """

    model: str
    streams: int
    max_tokens: int
    label: str
    seconds: float = 0.0
    leaving: float = 0.0
    seed: int = 0

    def request(self, stream: int, number: int) -> ChatJob:
        """Return the job whose request 0 this stream sends as its `number`th.

        In a closed loop the lengths of prompts and answers vary: an engine keeps something for every size of a step
        that it has seen, and a load of one size would never fill what it keeps.
        """
        chance, label = self._chance(stream, number), f"{self.label}-{stream}-{number}"
        if not self.seconds:
            return ChatJob(self.model, 1, 1, streamed=True, max_tokens=self.max_tokens, label=label)
        return ChatJob(
            model=self.model,
            streams=1,
            requests=1,
            streamed=number % 2 == 0,
            max_tokens=chance.randint(1, 2 * self.max_tokens),
            label=label,
            sentences=chance.randint(1, _MAX_SENTENCES),
        )

    def leaves_after_seconds(self, stream: int, number: int) -> float | None:
        """Return when the client hangs up, None if it stays."""
        chance = self._chance(number, stream)
        return chance.uniform(0, _LEAVES_SECONDS) if chance.random() < self.leaving else None

    def _chance(self, *place: int) -> random.Random:
        return random.Random(f"{self.seed}-{place}")  # noqa: S311  # repeatable on purpose


class RoughMeasurement(msgspec.Struct):
    """What became of the requests: answered, refused as they should be, left by their client, or wrong, in words."""

    wall_seconds: float = 0.0
    answered_seconds: list[float] = []
    refused_seconds: list[float] = []
    left: int = 0
    wrong: int = 0
    what_was_wrong: list[str] = []

    def add(self, answer: Answer) -> None:
        """Sort an answer that came to its end."""
        seconds = answer.finished - answer.started
        if answer.status in {429, 503} and (answer.retry_after or b"").isdigit():
            self.refused_seconds.append(seconds)
            return
        try:
            answer.completion_tokens()
        except Exception as error:  # noqa: BLE001  # counted, and shown
            self.add_wrong(str(error))
        else:
            self.answered_seconds.append(seconds)

    def add_wrong(self, what: str) -> None:
        """Count a request that was neither answered nor refused; a few of them are kept in words."""
        self.wrong += 1
        if len(self.what_was_wrong) < _SHOWN:
            self.what_was_wrong.append(what)


def rough_figures(seen: RoughMeasurement) -> Figures:
    """Put what was seen into figures."""
    answered, refused = seen.answered_seconds, seen.refused_seconds
    return {
        "answered": len(answered),
        "refused": len(refused),
        "left": seen.left,
        "wrong": seen.wrong,
        "answered_p50_ms": milliseconds(percentile(answered, 50)),
        "answered_p99_ms": milliseconds(percentile(answered, 99)),
        "refused_p50_ms": milliseconds(percentile(refused, 50)),
        "refused_p99_ms": milliseconds(percentile(refused, 99)),
        "wall_seconds": seen.wall_seconds,
    }

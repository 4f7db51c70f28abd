"""One run of a flood beside single requests: the order for it, what both senders saw, and the figures and aims."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from benchmarks.chat_job import ChatJob
from benchmarks.figures import milliseconds, percentile
from benchmarks.verdicts import Verdict

if TYPE_CHECKING:
    from benchmarks.figures import Figures

# A clock that beats as evenly as the flood's rounds would meet each of them at the same place.
_JITTER = 0.2

FAIR, FIRST_COME, B_ALONE, A_ALONE, A_ALONE_FIRST_COME = (
    "A and B, fair",
    "A and B, first come",
    "B alone",
    "A alone, fair",
    "A alone, first come",
)


class FairJob(msgspec.Struct, frozen=True):
    """Key A keeps `flood` requests in flight; key B sends one about every `every_seconds`, for `seconds`.

    0 of either: that key sends nothing. With B the run goes on until B's last answer, with A's flood around it.
    """

    model: str
    seconds: float
    flood: int
    every_seconds: float
    max_tokens: int
    label: str
    seed: int = 0
    lead_seconds: float = 2.0

    def moments(self) -> list[float]:
        """Return when B sends each request, in seconds; chance moves each a little."""
        if not self.every_seconds:
            return []
        chance = random.Random(self.seed)  # noqa: S311  # no secret
        count = max(1, round(self.seconds / self.every_seconds))
        return [(number + _JITTER * chance.random()) * self.every_seconds for number in range(count)]

    def requests_of(self, owner: str) -> ChatJob:
        """Return what key `owner` asks for: streamed answers of exactly `max_tokens`, each prompt a new one."""
        return ChatJob(self.model, 1, 1, streamed=True, max_tokens=self.max_tokens, label=f"{self.label}{owner}")


class FairMeasurement(msgspec.Struct):
    """What was seen of both keys. Of A's flood counts what was answered in `wall_seconds`."""

    wall_seconds: float = 0.0
    flood_requests: int = 0
    flood_tokens: int = 0
    flood_gaps_seconds: list[float] = []  # between two pieces of text of one answer: a step of the engine
    time_to_first_token_seconds: list[float] = []
    latency_seconds: list[float] = []
    late_seconds: list[float] = []  # how long after its moment each of B's requests was really sent


def fair_figures(seen: FairMeasurement) -> Figures:
    """Put a run into figures; None for the key that sent nothing."""
    first, whole, gaps = seen.time_to_first_token_seconds, seen.latency_seconds, seen.flood_gaps_seconds
    flooded = seen.flood_requests > 0
    return {
        "b_requests": float(len(whole)) if whole else None,
        "b_latency_p50_ms": milliseconds(percentile(whole, 50)),
        "b_latency_p95_ms": milliseconds(percentile(whole, 95)),
        "b_latency_p99_ms": milliseconds(percentile(whole, 99)),
        "b_time_to_first_token_p50_ms": milliseconds(percentile(first, 50)),
        "b_time_to_first_token_p95_ms": milliseconds(percentile(first, 95)),
        "b_sent_late_p95_ms": milliseconds(percentile(seen.late_seconds, 95)),
        "a_requests_per_second": seen.flood_requests / seen.wall_seconds if flooded else None,
        "a_tokens_per_second": seen.flood_tokens / seen.wall_seconds if flooded else None,
        "a_inter_token_latency_p50_ms": milliseconds(percentile(gaps, 50)),
        "wall_seconds": seen.wall_seconds,
    }


def verdicts(medians: dict[str, Figures]) -> list[Verdict]:
    """Judge the medians of all targets."""
    alone, fair, unfair = medians[B_ALONE], medians[FAIR], medians[FIRST_COME]
    p95, step = alone["b_latency_p95_ms"], fair["a_inter_token_latency_p50_ms"]
    bound = None if p95 is None or step is None else 1.5 * p95 + step
    share = _ratio(fair, medians[A_ALONE], "a_tokens_per_second")
    place = _ratio(medians[A_ALONE], medians[A_ALONE_FIRST_COME], "a_tokens_per_second")
    starved = _ratio(unfair, alone, "b_latency_p95_ms")
    return [
        Verdict.at_most("B's p95 beside A in ms (1.5 x B's p95 alone + one step)", fair["b_latency_p95_ms"], bound),
        Verdict.at_least("A's tokens/s beside B, of those alone on the same server,", share, 0.9),
        Verdict.at_least("B's p95 first come, first served, of that alone (the harm fairness prevents),", starved, 3.0),
        Verdict.at_least("A's tokens/s alone with a place kept free, of those with all places,", place, None),
    ]


def _ratio(ours: Figures, theirs: Figures, name: str) -> float | None:
    mine, other = ours[name], theirs[name]
    return None if mine is None or not other else mine / other

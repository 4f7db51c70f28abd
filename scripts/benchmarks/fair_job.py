"""One run of a flood beside single requests: the order for it, what both senders saw, and the figures and aims."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from benchmarks.chat_job import ChatJob
from benchmarks.figures import median_ratio, milliseconds, percentile
from benchmarks.verdicts import Verdict

if TYPE_CHECKING:
    from benchmarks.figures import Figures

# A clock that beats as evenly as the flood's rounds would meet each of them at the same place.
_JITTER = 0.2
_TIMES_ALONE = 1.5

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


def verdicts(runs: dict[str, list[Figures]]) -> list[Verdict]:
    """Judge the runs of all targets: each ratio is taken within a repeat, and their median counts."""
    p95, speed, step = "b_latency_p95_ms", "a_tokens_per_second", "a_inter_token_latency_p50_ms"
    repeats = list(zip(runs[FAIR], runs[B_ALONE], strict=True))
    bounds = [_sum(alone[p95], fair[step]) for fair, alone in repeats]
    beside = median_ratio([fair[p95] for fair, _ in repeats], bounds)
    share = median_ratio(_each(runs[FAIR], speed), _each(runs[A_ALONE], speed))
    starved = median_ratio(_each(runs[FIRST_COME], p95), _each(runs[B_ALONE], p95))
    place = median_ratio(_each(runs[A_ALONE], speed), _each(runs[A_ALONE_FIRST_COME], speed))
    return [
        Verdict.at_most(f"B's p95 beside A, of {_TIMES_ALONE} x that alone + one step,", beside, 1.0),
        Verdict.at_least("A's tokens/s beside B, of those alone on the same server,", share, 0.9),
        Verdict.at_least("B's p95 first come, first served, of that alone (B is starved there),", starved, 3.0),
        Verdict.at_least("A's tokens/s alone with a place kept free, of those with all places,", place, None),
    ]


def _each(runs: list[Figures], name: str) -> list[float | None]:
    return [run[name] for run in runs]


def _sum(alone_ms: float | None, step_ms: float | None) -> float | None:
    return None if alone_ms is None or step_ms is None else _TIMES_ALONE * alone_ms + step_ms

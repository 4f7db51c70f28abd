"""What the runs of `bench images` come to: where joining images pays and where it does not, and what chat feels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import median_ratio
from benchmarks.images_chat_job import BESIDE, IDLE
from benchmarks.images_targets import ONE_BY_ONE, REQUESTS, STEPS
from benchmarks.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare import Row

# What is less than this apart is the machine.
_NOISE = 0.05
_CHAT_TIMES = 1.5


def joining_verdicts(row: Row, *, overloaded: bool) -> list[Verdict]:
    """Judge a case of one load: joined images should be no slower and cost no more than one by one.

    Only where more is asked for than can be made does the speed say anything: else it is that of the arrivals.
    """
    judged = []
    for way in (REQUESTS, STEPS):
        said = f"{way}, of that one by one ({row.case})"
        if overloaded:
            speed = _ratio(row, "images_per_second", way, ONE_BY_ONE)
            judged.append(Verdict.at_least(f"images/s, {said},", speed, 1 - _NOISE))
        waited = _ratio(row, "latency_p95_ms", way, ONE_BY_ONE)
        judged.append(Verdict.at_most(f"p95 from asking to image, {said},", waited, 1 + _NOISE))
        cost = _ratio(row, "worker_cpu_seconds_per_image", way, ONE_BY_ONE)
        judged.append(Verdict.at_most(f"CPU per image, {said},", cost, 1 + _NOISE))
    return judged


def short_verdicts(row: Row) -> list[Verdict]:
    """Judge a case of short images beside long ones: here joining steps should help, and cost the long ones little."""
    wait, pace = "standard_p95_ms", "long_beside_per_second"
    case = f"({row.case})"
    return [
        Verdict.at_most(
            f"short images' p95, {STEPS}, of that {REQUESTS} {case},", _ratio(row, wait, STEPS, REQUESTS), 1
        ),
        Verdict.at_most(
            f"short images' p95, {STEPS}, of that one by one {case},", _ratio(row, wait, STEPS, ONE_BY_ONE), 1
        ),
        Verdict.at_least(
            f"long images/s, {STEPS}, of those {REQUESTS} {case},", _ratio(row, pace, STEPS, REQUESTS), None
        ),
    ]


def chat_verdicts(row: Row) -> list[Verdict]:
    """Judge chat beside images, unless in some repeat none was finished: then chat had little beside it."""
    gap, speed = "inter_token_latency_p99_ms", "tokens_per_second"
    waited, pace = (
        _ratio(row, figure, BESIDE, IDLE) if all(_each(row, "images_per_second", BESIDE)) else None
        for figure in (gap, speed)
    )
    return [
        Verdict.at_most("p99 between tokens beside images, of that idle,", waited, _CHAT_TIMES),
        Verdict.at_least("chat's tokens/s beside images, of those idle,", pace, None),
    ]


def _ratio(row: Row, figure: str, ours: str, theirs: str) -> float | None:
    return median_ratio(_each(row, figure, ours), _each(row, figure, theirs))


def _each(row: Row, figure: str, target: str) -> Sequence[float | None]:
    return [run[figure] for run in row.runs[target]]

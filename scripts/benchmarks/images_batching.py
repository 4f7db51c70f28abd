"""The first part of `bench images`: finds what one by one can do, then has all three ways bear the same loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.compare import Case, Row, compare, say
from benchmarks.images_aims import joining_verdicts, short_verdicts
from benchmarks.images_job import ImagesJob, at_once, poisson
from benchmarks.images_targets import ONE_BY_ONE, started

if TYPE_CHECKING:
    from benchmarks.images_targets import WorkersTarget
    from benchmarks.images_worker import WorkerOrder
    from benchmarks.verdicts import Verdict
    from benchmarks.workplace import Workplace

_HD_PART = 1 / 3
_OWNERS = 4
_FEWEST_IMAGES = 9
_FEWEST_SHORT = 6
_SHORT_LOAD = 0.3
_LONG_BESIDE = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for. `loads` are parts of what one by one can do; `seconds` is about the length of a run."""

    model: str
    sizes: tuple[int, ...]
    loads: tuple[float, ...]
    repeats: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it. `capacity`: images/s one by one, by size."""

    rows: list[Row]
    aims: list[Verdict]
    capacity: dict[str, float]
    device: str


async def measured(place: Workplace, order: WorkerOrder, load: Load) -> Found:
    """Do all runs. Raises `BenchError`."""
    rows: list[Row] = []
    aims: list[Verdict] = []
    capacity: dict[str, float] = {}
    say("Loading the image model three times: one by one, with requests joined, with steps joined.")
    async with started(place, order) as targets:
        for size in load.sizes:
            speed = await _capacity(targets, load, size)
            capacity[f"{size}x{size}"] = speed
            for part in load.loads:
                (row,) = await _compared(targets, _case(load, size, part, speed), load)
                rows.append(row)
                aims += joining_verdicts(row, overloaded=part > 1)
            (row,) = await _compared(targets, _short_case(load, size, speed), load, headline="standard_p95_ms")
            rows.append(row)
            aims += short_verdicts(row)
        return Found(rows, aims, capacity, targets[0].device)


async def _capacity(targets: list[WorkersTarget], load: Load, size: int) -> float:
    """Warm all of them up and return how many images/s one by one makes when it always has work.

    Of two tries the faster: what else runs on this machine can only slow it down, and loads would be too small.
    """
    job = ImagesJob(load.model, size, at_once(_FEWEST_IMAGES, hd_part=_HD_PART, owners=_OWNERS))
    speed = 0.0
    for target in targets:
        await target.measure(job)
        if target.name == ONE_BY_ONE:
            speed = max([(await target.measure(job))["images_per_second"] or 0.0 for _ in range(2)])
    say(f"{size}x{size}: one by one makes {speed:.2f} images/s, a third of them hd. Measuring:")
    return speed


async def _compared(
    targets: list[WorkersTarget], case: Case[ImagesJob], load: Load, headline: str = "latency_p95_ms"
) -> list[Row]:
    return await compare(targets, [case], repeats=load.repeats, headline=headline)


def _case(load: Load, size: int, part: float, speed: float) -> Case[ImagesJob]:
    rate = part * speed
    count = max(_FEWEST_IMAGES, round(rate * load.seconds))

    def job(repeat: int) -> ImagesJob:
        arrivals = poisson(rate, count, hd_part=_HD_PART, owners=_OWNERS, seed=repeat)
        return ImagesJob(load.model, size, arrivals)

    return Case(f"{size}x{size}, load {part:g}", job)


def _short_case(load: Load, size: int, speed: float) -> Case[ImagesJob]:
    """Short images now and then, on a worker that always has long ones."""
    rate = _SHORT_LOAD * speed
    count = max(_FEWEST_SHORT, round(rate * load.seconds))

    def job(repeat: int) -> ImagesJob:
        arrivals = poisson(rate, count, hd_part=0, owners=1, seed=1000 + repeat)
        return ImagesJob(load.model, size, arrivals, long_beside=_LONG_BESIDE)

    return Case(f"{size}x{size}, short beside long", job)

"""One run of image requests: when each comes and what it asks for, what was seen of them, and the figures.

Who makes the images is images_targets.py's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from benchmarks.figures import milliseconds, percentile
from engine import ImageRequest
from engine.types import Quality  # msgspec reads it

if TYPE_CHECKING:
    from benchmarks.figures import Figures

_THINGS = ("red circle", "blue square", "green triangle", "yellow star")
_GROUNDS = ("white", "black", "grey")


class Arrival(msgspec.Struct, frozen=True):
    """One image is asked for at `moment`, in seconds from the start, by `owner`."""

    moment: float
    quality: Quality
    owner: str
    seed: int


class ImagesJob(msgspec.Struct, frozen=True):
    """Images of one size, each asked for when its moment comes, whether earlier ones are done or not.

    `long_beside`: so many hd images are always being asked for besides, each by an owner of its own, from
    `lead_seconds` before the start to the end.
    """

    model: str
    size: int
    arrivals: tuple[Arrival, ...]
    long_beside: int = 0
    lead_seconds: float = 1.0

    def request(self, arrival: Arrival) -> ImageRequest:
        """Return what the engine is asked; the seed decides about the prompt too."""
        thing, ground = _THINGS[arrival.seed % len(_THINGS)], _GROUNDS[arrival.seed % len(_GROUNDS)]
        return ImageRequest(
            request_id=f"bench-{arrival.owner}-{arrival.seed}",
            model=self.model,
            prompt=f"a {thing} on a {ground} background",
            size=self.size,
            quality=arrival.quality,
            seed=arrival.seed,
            owner=arrival.owner,
        )


class ImagesMeasurement(msgspec.Struct):
    """What was seen of a run: from its moment to its image, for each arrival. `cpu_seconds` are the worker's.

    `device` and `batches` are what the worker says of itself.
    """

    device: str
    batches: str
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0
    standard_seconds: list[float] = []
    hd_seconds: list[float] = []
    long_beside: int = 0  # hd images that became finished beside the arrivals
    late_seconds: list[float] = []  # how long after its moment each request was really sent


def poisson(rate: float, count: int, *, hd_part: float, owners: int, seed: int) -> tuple[Arrival, ...]:
    """Return `count` arrivals, `rate` a second on average, at moments that only the seed decides.

    Exactly the part `hd_part` of them is of quality hd, so that all runs of a case hold the same work; which ones,
    and whose, is left to chance.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret
    long = round(count * hd_part)
    qualities: list[Quality] = ["hd" if number < long else "standard" for number in range(count)]
    chance.shuffle(qualities)
    moment, arrivals = 0.0, []
    for quality in qualities:
        moment += chance.expovariate(rate)
        arrivals.append(Arrival(moment, quality, f"user-{chance.randrange(owners)}", chance.randrange(2**31)))
    return tuple(arrivals)


def at_once(count: int, *, hd_part: float, owners: int) -> tuple[Arrival, ...]:
    """Return the same kind of arrivals, all of them at the start: how fast can they be made?"""
    scattered = poisson(1.0, count, hd_part=hd_part, owners=owners, seed=count)
    return tuple(msgspec.structs.replace(arrival, moment=0.0) for arrival in scattered)


def images_figures(job: ImagesJob, seen: ImagesMeasurement) -> Figures:
    """Put a run into figures; None for what did not come in it.

    Beside long ones the speed is no figure: the arrivals set it. Nor is the CPU per image: some are never finished.
    """
    every = seen.standard_seconds + seen.hd_seconds
    alone = not job.long_beside
    return {
        "images_per_second": len(every) / seen.wall_seconds if alone else None,
        "latency_p50_ms": milliseconds(percentile(every, 50)),
        "latency_p95_ms": milliseconds(percentile(every, 95)),
        "standard_p50_ms": milliseconds(percentile(seen.standard_seconds, 50)),
        "standard_p95_ms": milliseconds(percentile(seen.standard_seconds, 95)),
        "hd_p50_ms": milliseconds(percentile(seen.hd_seconds, 50)),
        "hd_p95_ms": milliseconds(percentile(seen.hd_seconds, 95)),
        "worker_cpu_seconds_per_image": seen.cpu_seconds / len(every) if alone else None,
        "worker_peak_rss_mib": seen.peak_rss_bytes / 2**20,
        "long_beside_per_second": None if alone else seen.long_beside / seen.wall_seconds,
        "sent_late_p95_ms": milliseconds(percentile(seen.late_seconds, 95)),
        "asked_per_second": _asked_per_second(job),
        "images": float(len(every)),
        "wall_seconds": seen.wall_seconds,
    }


def _asked_per_second(job: ImagesJob) -> float | None:
    last = max((arrival.moment for arrival in job.arrivals), default=0.0)
    return len(job.arrivals) / last if last else None

"""Asks for the images of one run at their moments and times them. Who makes them is the caller's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.errors import BenchError
from benchmarks.images_job import Arrival
from engine import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from benchmarks.images_job import ImagesJob, ImagesMeasurement
    from engine import ImageRequest

    Make: TypeAlias = "Callable[[ImageRequest], Awaitable[None]]"


async def run(job: ImagesJob, make: Make, seen: ImagesMeasurement, cpu_seconds: Callable[[], float]) -> None:
    """Fill `seen`. `make` returns when the image is there. Raises `BenchError` when a single one fails."""
    try:
        async with _long_ones(job, make, seen):
            await asyncio.sleep(job.lead_seconds if job.long_beside else 0.0)
            seen.long_beside = 0  # those of the lead do not count
            cpu, start = cpu_seconds(), time.perf_counter()
            async with asyncio.TaskGroup() as asked:
                for arrival in job.arrivals:
                    asked.create_task(_ask(job, arrival, start, make, seen))
            seen.wall_seconds, seen.cpu_seconds = time.perf_counter() - start, cpu_seconds() - cpu
    except* EngineError as failed:
        raise BenchError(f"an image failed: {_first(failed)}") from None


async def _ask(job: ImagesJob, arrival: Arrival, start: float, make: Make, seen: ImagesMeasurement) -> None:
    await asyncio.sleep(start + arrival.moment - time.perf_counter())
    seen.late_seconds.append(time.perf_counter() - start - arrival.moment)
    await make(job.request(arrival))
    # From its moment, not from when it was sent: a late sender would hide what came late
    waited = time.perf_counter() - start - arrival.moment
    (seen.hd_seconds if arrival.quality == "hd" else seen.standard_seconds).append(waited)


@contextlib.asynccontextmanager
async def _long_ones(job: ImagesJob, make: Make, seen: ImagesMeasurement) -> AsyncIterator[None]:
    """Keep hd images in the making meanwhile, then give up what is left of them."""
    numbers = count()

    async def one_after_another(owner: str) -> None:
        for number in numbers:
            await make(job.request(Arrival(0.0, "hd", owner, number)))
            seen.long_beside += 1

    tasks = [asyncio.create_task(one_after_another(f"long-{number}")) for number in range(job.long_beside)]
    try:
        yield
        for ended in filter(asyncio.Task.done, tasks):  # none does unless it failed
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

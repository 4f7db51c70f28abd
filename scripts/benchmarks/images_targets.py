"""What `bench images` compares below HTTP: one pipeline, run one image at a time, by requests and by steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.children import Child
from benchmarks.compare import say
from benchmarks.errors import BenchError
from benchmarks.images_job import ImagesMeasurement, images_figures
from engine.config_profiles import SIZES, ImageProfile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.figures import Figures
    from benchmarks.images_job import ImagesJob
    from benchmarks.images_worker import WorkerOrder
    from benchmarks.workplace import Workplace

ONE_BY_ONE, REQUESTS, STEPS = "one by one", "requests joined", "steps joined"
_CHANGES: dict[str, dict[str, Any]] = {
    STEPS: {"batching": "steps"},
    ONE_BY_ONE: {"batching": "requests", "max_batch": {f"{size}x{size}": 1 for size in SIZES}},
    REQUESTS: {"batching": "requests"},
}
_START_SECONDS = 900.0  # a large model is read from a slow disk


class WorkersTarget:
    """One of the three ways, on a loaded model of its own."""

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self.device = ""
        self._child = child

    async def measure(self, job: ImagesJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        seen = await self._child.run(job, ImagesMeasurement)
        self.device = seen.device
        if seen.batches != _CHANGES[self.name]["batching"]:
            raise BenchError(
                "This pipeline has no step-level batching (no adapter of its family, or it is offloaded), so there is "
                "nothing to compare. Measure another model."
            )
        return images_figures(job, seen)


def profiles(base: ImageProfile) -> dict[str, ImageProfile]:
    """Return the profile of each way: nothing but the joining of images differs."""
    plain = base.model_dump(by_alias=True)
    return {name: ImageProfile.model_validate({**plain, **changes}) for name, changes in _CHANGES.items()}


@contextlib.asynccontextmanager
async def started(place: Workplace, order: WorkerOrder) -> AsyncIterator[list[WorkersTarget]]:
    """Load the model of `order` in three ways, one after the other, and end all in the end. Raises `BenchError`.

    All stay loaded, so that runs can take turns; only one has work at a time.
    """
    base = ImageProfile.model_validate_json(order.profile)
    async with contextlib.AsyncExitStack() as stack:
        targets = []
        for name, profile in profiles(base).items():
            child = await Child.start(
                f"owner of the worker ({name})",
                "benchmarks.images_worker",
                msgspec.json.encode(
                    msgspec.structs.replace(order, profile=profile.model_dump_json(by_alias=True))
                ).decode(),
                environment=place.environment,
                log=place.log(name.replace(" ", "-")),
            )
            stack.push_async_callback(child.stop)
            await child.prepared(_START_SECONDS)
            say(f"  {name}: loaded")
            targets.append(WorkersTarget(name, child))
        yield targets

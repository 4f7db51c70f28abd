"""The owner of one image worker, a process of its own: loads the model as the server does, drives it without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import uvloop

from benchmarks.children import serve_jobs
from benchmarks.errors import BenchError
from benchmarks.footprint import peak_rss_bytes
from benchmarks.images_job import ImagesJob, ImagesMeasurement
from benchmarks.images_run import run
from engine import EngineError, FinishedImage, load_config
from engine.backends.diffusers.model import ImageModel
from engine.config import ImageModelSpec
from engine.config.profiles import ImageProfile
from engine.process.parent import WorkerDiedError

if TYPE_CHECKING:
    from engine import ImageRequest


class WorkerOrder(msgspec.Struct, frozen=True):
    """Which model is loaded, and how. `profile` is an `ImageProfile` as JSON."""

    models: str
    model: str
    folder: str
    profile: str
    threads: int


class WorkerOwner:
    """One loaded image model."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._model: ImageModel | None = None

    async def start(self) -> None:
        """Load it. Raises `BenchError`."""
        order = self._order
        spec = load_config(Path(order.models)).models[order.model]
        assert isinstance(spec, ImageModelSpec)  # noqa: S101  # the command has checked it
        try:
            self._model = await ImageModel.load(
                spec,
                ImageProfile.model_validate_json(order.profile),
                Path(order.folder),
                threads=order.threads,
                mark=True,
                # That only lowers the worker's priority, for the sake of a chat that is not here.
                on_cpu=False,
                report=lambda _phase, _progress: None,
            )
        except (EngineError, WorkerDiedError) as error:
            raise BenchError(f"the model cannot be loaded: {error}") from error

    async def stop(self) -> None:
        """End the worker."""
        if self._model is not None:
            await self._model.shutdown()

    async def measure(self, job: ImagesJob) -> ImagesMeasurement:
        """Do one run. Raises `BenchError`."""
        model = self._model
        assert model is not None  # noqa: S101  # jobs come after the start
        process = psutil.Process(model.worker.pid)
        seen = ImagesMeasurement(model.ready.device, model.ready.batches)

        def cpu_seconds() -> float:
            times = process.cpu_times()
            return times.user + times.system

        await run(job, self._make, seen, cpu_seconds)
        seen.peak_rss_bytes = peak_rss_bytes(process.pid)
        await model.idle()
        return seen

    async def _make(self, request: ImageRequest) -> None:
        assert self._model is not None  # noqa: S101  # as above
        async with contextlib.aclosing(self._model.images(request)) as events:
            async for event in events:
                if isinstance(event, FinishedImage) and not event.data:
                    raise BenchError("an image came without data")


async def _serve(order: WorkerOrder) -> None:
    owner = WorkerOwner(order)
    try:
        await serve_jobs(ImagesJob, owner.measure, prepare=owner.start)
    finally:
        await owner.stop()


def main() -> None:
    """Take jobs from stdin. Argument: a `WorkerOrder` as JSON."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(msgspec.json.decode(sys.argv[1], type=WorkerOrder)))


if __name__ == "__main__":
    main()

"""An image model as the server's process sees it: a queue, a worker process that holds the pipeline, and jobs for it.

What happens to a job is the worker's (service.py); who goes next is admission.py's.
"""

import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.admission import Room
from engine.backends.diffusers import protocol as messages
from engine.config import ImageModelSpec
from engine.config_profiles import SIZES, ImageProfile
from engine.process.backend import InWorker, Outbox, given_up_after, start_worker
from engine.process.parent import WorkerProcess
from engine.types import FinishedImage, ImageEvent, ImageProgress, ImageRequest, PartialImage

_SERVICE = "engine.backends.diffusers.service:open_service"
# What fits into a worker at the same time, in parts that every batch size up to 10 divides.
_WHOLE = 2520
_SEEDS = 2**63
_MOST_UNREAD_BYTES = 128 * 2**20  # of one request: four images of 1024 pixels with their previews, and to spare


class ImageModel(InWorker):
    """One loaded image model. Made by `load`."""

    def __init__(self, worker: WorkerProcess, spec: ImageModelSpec, profile: ImageProfile) -> None:
        places = max(profile.batch(size) for size in SIZES)
        waiting, fair = spec.engine.max_queued_images, spec.engine.fair_queue
        super().__init__(worker, Room(sequences=places, waiting=waiting, kv_tokens=_WHOLE, fair=fair))
        self._spec = spec
        self._profile = profile
        self.ready = msgspec.msgpack.decode(worker.info, type=messages.ImageReady)

    @classmethod
    async def load(  # noqa: PLR0913  # what a load depends on
        cls,
        spec: ImageModelSpec,
        profile: ImageProfile,
        folder: Path,
        *,
        threads: int,
        mark: bool,
        on_cpu: bool,
        report: Callable[[str, float], None],
    ) -> Self:
        """Start a worker and have it load the pipeline. Raises `LoadError` when that can never work."""
        options = messages.ImageOptions(str(folder), profile.model_dump_json(by_alias=True), threads, mark)
        stall_seconds = spec.engine.stall_seconds
        worker = await start_worker(
            _SERVICE, options, report, threads=threads, on_cpu=on_cpu, stall_seconds=stall_seconds
        )
        return cls(worker, spec, profile)

    async def images(self, request: ImageRequest) -> AsyncGenerator[ImageEvent, None]:
        """Yield what becomes of each image, as it comes; closing the generator aborts all of them.

        Raises `EngineError`s; an image that fails ends its whole request.
        """
        if request.before_turn is not None:
            await request.before_turn(request.n)
        events: Outbox[ImageEvent] = Outbox(_MOST_UNREAD_BYTES)
        # Without a seed by chance, in the range that every client's numbers can hold
        first = secrets.randbits(32) if request.seed is None else request.seed
        jobs = [partial(self._make, request, index, (first + index) % _SEEDS, events) for index in range(request.n)]
        async with contextlib.aclosing(self.delivered(events, jobs)) as delivered:
            async for event in delivered:
                yield event

    async def _make(self, request: ImageRequest, index: int, seed: int, events: Outbox[ImageEvent]) -> None:
        steps = self._profile.step_count(request.quality)
        share = _WHOLE // self._profile.batch(request.size)
        turn = self.admission.enter(request.owner, prompt_tokens=share, max_tokens=0, weight=request.queue_share)
        async with turn:
            if request.on_turn is not None:
                request.on_turn()
            advice = "Ask for a smaller `size`, or for `quality: standard`."
            frames = given_up_after(self._spec.engine.max_seconds, self.worker.run(_job(request, seed)), advice)
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    event = _event(frame, index, seed)
                    if isinstance(event, ImageProgress):
                        # Its cost for fairness: room times steps, in units of a standard image of that size
                        turn.answer_tokens = max(1, share * event.step // self._profile.steps.standard)
                    events.put(event, len(frame))
            turn.answer_tokens = max(1, share * steps // self._profile.steps.standard)


def _job(request: ImageRequest, seed: int) -> bytes:
    job = messages.ImageJob(
        prompt=request.prompt,
        size=request.size,
        quality=request.quality,
        seed=seed,
        negative_prompt=request.negative_prompt,
        output_format=request.output_format,
        compression=request.compression,
        partial_images=request.partial_images,
    )
    return msgspec.msgpack.encode(job)


def _event(frame: bytes, index: int, seed: int) -> ImageEvent:
    told: Any = msgspec.msgpack.decode(frame, type=messages.ImageEvent)
    match told:
        case messages.Step(step, steps):
            return ImageProgress(index, step, steps)
        case messages.Partial(number, data):
            return PartialImage(index, number, data)
        case messages.Finished(data, steps):
            return FinishedImage(index, data, seed, steps)
    raise TypeError(told)

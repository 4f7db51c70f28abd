"""An image model as the server's process sees it: a queue, a worker process with the pipeline, and jobs for it."""

import asyncio
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from engine.admission import Room
from engine.backends import together
from engine.backends.diffusers.edits import MOST_PICTURES, check_edit, prepared, weight_of
from engine.config import ImageModelSpec
from engine.config.models import SIZES, ImageProfile
from engine.media import Pictures, PixelBudget, decode_image, decode_mask
from engine.process.parent import WorkerBackend, WorkerProcess, start_worker
from engine.stream import ImageStream, Stream
from engine.types import Edit, EditRequest, ImageEvent, ImageJob, ImageProgress, ImageRequest, Report
from engine.weights.safety import pipeline_class

_ADVICE = "Ask for a smaller `size`, or for `quality: standard`."
_SERVICE = "engine.backends.diffusers.service:open_service"
# What fits into a worker at the same time, in parts that every batch size up to 10 divides.
_WHOLE = 2520
_SEEDS = 2**63
_PREPARED_PIXELS = 64 * 2**20  # of edits that wait or run; those of others wait as files


class ImageModel(WorkerBackend):
    """One loaded image model. Made by `load`."""

    def __init__(
        self, worker: WorkerProcess, spec: ImageModelSpec, profile: ImageProfile, family: str, pictures: Pictures
    ) -> None:
        places = max(profile.max_batch.of(size) for size in SIZES)
        waiting, fair = spec.engine.max_queued_images, spec.engine.fair_queue
        super().__init__(worker, Room(sequences=places, waiting=waiting, kv_room=_WHOLE, fair=fair))
        self._spec = spec
        self._profile = profile
        self._family, self._pictures = family, pictures
        self._prepared = PixelBudget(_PREPARED_PIXELS)

    @property
    def edits(self) -> bool:
        """Whether it makes images of pictures."""
        return self._family in MOST_PICTURES

    @property
    def negative_prompts(self) -> bool:
        """Whether it takes what an image does not show."""
        return bool(self._profile.negative_prompt)

    @classmethod
    async def load(  # noqa: PLR0913  # what a load depends on
        cls,
        spec: ImageModelSpec,
        profile: ImageProfile,
        folder: Path,
        pictures: Pictures,
        *,
        threads: int,
        mark: bool,
        on_cpu: bool,
        report: Report,
    ) -> Self:
        """Start a worker and have it load the pipeline. Raises `LoadError` when that can never work."""
        family = await asyncio.to_thread(pipeline_class, folder)
        report("importing diffusers", 0.1)
        options = (str(folder), profile.model_dump_json(by_alias=True), mark)
        stall = spec.engine.stall_seconds
        worker = await start_worker(_SERVICE, options, report, threads=threads, on_cpu=on_cpu, stall_seconds=stall)
        return cls(worker, spec, profile, family, pictures)

    def images(self, request: ImageRequest, stream: ImageStream) -> None:
        """Put what becomes of each image into `stream`; closing it aborts all. If one fails, all end: `EngineError`.

        Raises `RequestError` for an edit that this kind of model cannot do.
        """
        if request.edit is not None:
            check_edit(request.edit, self._family)
        self.start(stream, partial(self._make_all, request))

    async def _make_all(self, request: ImageRequest, events: Stream[ImageEvent]) -> None:
        if request.before_turn is not None:
            await request.before_turn(request.n)
        if request.edit is None:
            await self._make_each(request, events)
            return
        # Before and after, in both sizes, of the picture and the mask; at most.
        edge, pictures = max(self._profile.render_size.of(request.size), request.size), len(request.edit.pictures)
        async with self._prepared.taken(request.owner, (pictures + 2) * edge * edge):
            edit = await self._read(request.edit, request)
            await self._make_each(replace(request, edit=None), events, edit, weight_of(request.edit, self._family))

    async def _read(self, edit: EditRequest, request: ImageRequest) -> Edit:
        """Return its pictures in the sizes that are needed. Raises `RequestError`, naming the one that is none."""
        files = [(name, file, decode_image) for name, file in zip(edit.names, edit.pictures, strict=True)]
        if edit.mask is not None:
            files.append(("mask", edit.mask, decode_mask))
        edge = self._profile.render_size.of(request.size)
        make = partial(prepared, edit=edit, family=self._family, edge=edge, size=request.size)
        return await self._pictures.made_of(request.owner, files, make)

    async def _make_each(
        self, request: ImageRequest, events: Stream[ImageEvent], edit: Edit | None = None, weight: int = 1
    ) -> None:
        # Without a seed a random one, in the range that every client's numbers can hold
        first = secrets.randbits(32) if request.seed is None else request.seed
        job = msgspec.convert(replace(request, seed=first), ImageJob, from_attributes=True)
        job = msgspec.structs.replace(job, edit=edit, weight=weight)
        jobs = [msgspec.structs.replace(job, index=index, seed=(first + index) % _SEEDS) for index in range(request.n)]
        await together(self._make_one(one, request, events) for one in jobs)

    async def _make_one(self, job: ImageJob, request: ImageRequest, events: Stream[ImageEvent]) -> None:
        share = _WHOLE // max(1, self._profile.max_batch.of(request.size) // job.weight)
        turn = self.admission.enter(request.owner, prompt_tokens=share, max_tokens=0, weight=request.queue_share)

        def take(payload: msgspec.Raw) -> None:
            event: ImageEvent = msgspec.msgpack.decode(payload, type=ImageEvent)
            if isinstance(event, ImageProgress):
                # Its cost for fairness: room times steps, in units of a standard image of that size
                turn.answer_tokens = max(1, share * event.step // self._profile.steps.standard)
            events.put(event)

        async with turn:
            events.dispatched()
            await self.run(job, take, within_seconds=self._spec.engine.max_seconds, advice=_ADVICE)

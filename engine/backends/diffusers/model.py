"""An image model as the server's process sees it: a queue, a worker process with the pipeline, and jobs for it.

It also knows which families edit pictures, and turns the files of an edit into pixels of the sizes that a worker needs.
"""

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from PIL import Image, ImageOps

from engine.admission import Room
from engine.backends import together
from engine.config import ImageModelSpec
from engine.config.models import SIZES, ImageProfile
from engine.errors import RequestError, UnsupportedCapabilityError
from engine.media import Pictures, PixelBudget, decode_image, decode_mask
from engine.process.parent import WorkerBackend, WorkerProcess, start_worker
from engine.process.watchdog import Patience
from engine.stream import ImageStream, Stream
from engine.types import Edit, EditRequest, ImageEvent, ImageJob, ImageProgress, ImageRequest, Picture, Report
from engine.weights.safety import pipeline_class

_ADVICE = "Ask for a smaller `size`, or for `quality: standard`."
_SERVICE = "engine.backends.diffusers.service:open_service"
# What fits into a worker at the same time, in parts: a number that every batch size up to 10 divides.
_WHOLE = 2520
_SEEDS = 2**63
_PREPARED_PIXELS = 64 * 2**20  # of edits that wait or run; those of others wait as files
# Pictures that a family takes at once. One that takes several looks at them; the others begin an image with one.
_MOST_PICTURES = {"Flux2KleinPipeline": 4, "QwenImagePipeline": 1, "StableDiffusionXLPipeline": 1, "ZImagePipeline": 1}
_STRENGTH = 0.7  # without a mask; within one all is made anew
# Bounds of FLUX.2-klein for pictures that it looks at.
_LEAST_SIDE = 64
_LONGEST_TO_SHORTEST = 8
_MOST_PIXELS = 1024 * 1024
_SEEN = 2  # all together have at most the pixels of so many images


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
        return self._family in _MOST_PICTURES

    @property
    def negative_prompts(self) -> bool:
        """Whether it takes a negative prompt."""
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
        """Start a worker and have it load the pipeline. Raises `LoadError` if that can never work."""
        family = await asyncio.to_thread(pipeline_class, folder)
        report("importing diffusers", 0.1)
        options = (str(folder), profile.model_dump_json(by_alias=True), mark)
        patience = Patience.of(spec.engine.stall_seconds, on_cpu=on_cpu)
        worker = await start_worker(_SERVICE, options, report, threads=threads, on_cpu=on_cpu, patience=patience)
        return cls(worker, spec, profile, family, pictures)

    def images(self, request: ImageRequest, stream: ImageStream) -> None:
        """Put the events of each image into `stream`; closing it aborts all. If one fails, all end: `EngineError`.

        Raises `RequestError` for an edit that this family cannot do.
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
        """Return its pictures in the sizes that are needed. Raises `RequestError`, naming a file that is not one."""
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


def check_edit(edit: EditRequest, family: str) -> None:
    """Raise `UnsupportedCapabilityError` or `RequestError` for what a family cannot do, by its class's name."""
    most = _MOST_PICTURES.get(family)
    if most is None:
        raise UnsupportedCapabilityError(
            f"This model cannot edit pictures: it is a {family.removesuffix('Pipeline')}, which makes images of text"
            " alone. Pick a model with the capability `image_editing`.",
            param="model",
        )
    if len(edit.pictures) > most:
        pictures = "one picture" if most == 1 else f"at most {most} pictures"
        raise RequestError(f"This model takes {pictures} in a request. Leave the others out.", param=edit.names[most])
    if len(edit.pictures) > 1 and (edit.mask is not None or edit.strength is not None):
        name = "strength" if edit.mask is None else "mask"
        raise RequestError(f"`{name}` needs a single picture.", param=name)


def weight_of(edit: EditRequest, family: str) -> int:
    """Return how many images' memory a step takes: the model reads pictures beside the image in every step."""
    return 1 + min(len(edit.pictures), _SEEN) if _MOST_PICTURES[family] > 1 else 1


def prepared(images: Sequence[Image.Image], edit: EditRequest, family: str, *, edge: int, size: int) -> Edit:
    """Return an edit for the worker, from its pictures and, last, its mask. Blocking. Raises `RequestError`."""
    picture = images[0]
    if edit.mask is None and edit.strength is None and _MOST_PICTURES[family] > 1:
        most_pixels = min(edge * edge, _MOST_PIXELS) * _SEEN // max(_SEEN, len(images))
        seen = [_seen(image, most_pixels, name) for image, name in zip(images, edit.names, strict=True)]
        return Edit(tuple(map(_picture, seen)))
    start = _picture(_square(picture, edge))
    if edit.mask is None:
        return Edit((start,), edit.strength or _STRENGTH)
    mask = images[-1]
    if mask.size != picture.size:
        raise RequestError(
            f"The mask must be as large as the picture: it is {mask.width} x {mask.height}, and the picture"
            f" {picture.width} x {picture.height}.",
            param="mask",
        )
    return Edit(
        (start,),
        edit.strength or 1.0,
        _picture(_square(mask, edge)),
        _picture(_square(picture, size)),
        _picture(_square(mask, size)),
    )


def _square(image: Image.Image, edge: int) -> Image.Image:
    """Return the largest square in the middle, resized to `edge`. With that size already, no pixel changes."""
    method = Image.Resampling.NEAREST if image.mode == "L" else Image.Resampling.LANCZOS
    return ImageOps.fit(image, (edge, edge), method)


def _seen(image: Image.Image, most_pixels: int, name: str) -> Image.Image:
    """Return a whole picture, made smaller if it has more pixels."""
    width, height = image.size
    if min(width, height) < _LEAST_SIDE or max(width, height) > _LONGEST_TO_SHORTEST * min(width, height):
        raise RequestError(
            f"This model takes pictures of at least {_LEAST_SIDE} pixels on each side, of which the longer is at most "
            f"{_LONGEST_TO_SHORTEST} times the shorter; this one is {width} x {height}.",
            param=name,
        )
    scale = math.sqrt(most_pixels / (width * height))
    if scale >= 1:
        return image
    smaller = (max(16, int(width * scale)), max(16, int(height * scale)))
    return image.resize(smaller, Image.Resampling.LANCZOS)


def _picture(image: Image.Image) -> Picture:
    return Picture(image.width, image.height, image.tobytes())

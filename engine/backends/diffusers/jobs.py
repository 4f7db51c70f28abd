"""A job of the image service, from its payload to its one end. Shared by both ways of joining jobs."""

import io
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from engine.backends.diffusers.adapters.common import Denoising
from engine.backends.diffusers.protocol import ImageJob
from engine.config_profiles import SIZES, ImageProfile
from engine.errors import GenerationError, RequestError
from engine.process.service import Outlet
from engine.types import FinishedImage, ImageFormat, ImageProgress, PartialImage

INVALID = "The model made no valid image of this prompt and seed. Try again with another seed."
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


@dataclass(slots=True)
class Running:
    """One image that was asked for. `state`: how far it is, once it has begun and if it is run step by step."""

    number: int
    job: ImageJob
    edge: int
    steps: int
    state: Denoising | None = None
    previews: int = 0


@dataclass(slots=True)
class Desk:
    """Takes jobs in and hands their results out. Holds every job that has not ended, who waits longest first."""

    pipe: Any
    profile: ImageProfile
    mark: bool
    outlet: Outlet
    running: dict[int, Running] = field(default_factory=dict)

    def take(self, number: int, payload: msgspec.Raw) -> None:
        """Queue a job. Raises `RequestError` for one that this pipeline cannot do as it is asked."""
        job = msgspec.msgpack.decode(payload, type=ImageJob)
        if job.size not in SIZES:
            raise RequestError(f"size must be one of {', '.join(map(str, SIZES))}.", param="size")
        check_prompt(self.pipe, job.prompt, self.profile, param="prompt")
        if job.negative_prompt is not None:
            if not self.profile.negative_prompt:
                raise RequestError(
                    "This model takes no negative_prompt: it was made to do without. Say in the prompt what the image "
                    "should show instead.",
                    param="negative_prompt",
                )
            check_prompt(self.pipe, job.negative_prompt, self.profile, param="negative_prompt")
        self.running[number] = Running(
            number, job, self.profile.render_edge(job.size), self.profile.step_count(job.quality)
        )

    def drop(self, number: int) -> None:
        """End a job that nobody waits for any more; one that has ended already is left alone."""
        if self.running.pop(number, None) is not None:
            self.outlet.done(number)

    def next_together(self, agrees: Callable[[Running], Hashable]) -> list[Running]:
        """Return who is run next in one go, among those of whom `agrees` says the same."""
        candidates = [
            Candidate(running.number, agrees(running), share_of(self.profile.batch(running.job.size)))
            for running in self.running.values()
        ]
        chosen = [candidate.job for candidate in next_together(candidates)]
        for job in chosen:  # to the end of the line: sizes that cannot share a step take turns
            self.running[job] = self.running.pop(job)
        return [self.running[job] for job in chosen]

    def fail(self, number: int, message: str) -> None:
        """End a job whose image cannot be made; one that has ended already is left alone."""
        if self.running.pop(number, None) is not None:
            self.outlet.failed(number, GenerationError(message))

    def deliver(self, number: int, pixels: NDArray[Any], steps: int) -> None:
        """End a job with its picture, or as failed if that holds anything but numbers."""
        running = self.running.get(number)
        if running is None:
            return
        if not np.isfinite(pixels).all():
            self.fail(number, INVALID)
            return
        job = running.job
        self.outlet.event(number, FinishedImage(job.index, self._file(running, pixels), job.seed, steps))
        del self.running[number]
        self.outlet.done(number)

    def progressed(self, number: int, step: int, steps: int) -> None:
        """Say how far a job is, if it has not ended."""
        if (running := self.running.get(number)) is not None:
            self.outlet.event(number, ImageProgress(running.job.index, step, steps))

    def preview(self, running: Running, pixels: NDArray[Any]) -> None:
        """Show an unfinished picture, unless that holds anything but numbers."""
        if np.isfinite(pixels).all():
            preview = PartialImage(running.job.index, running.previews, self._file(running, pixels))
            self.outlet.event(running.number, preview)
            running.previews += 1

    def _file(self, running: Running, pixels: NDArray[Any]) -> bytes:
        job = running.job
        return encode(pixels, size=job.size, output_format=job.output_format, quality=job.compression, mark=self.mark)


class AtDesk:
    """What both `Service`s of images (engine/process/service.py) do alike: whatever comes goes to the desk."""

    def __init__(self, desk: Desk, info: object) -> None:
        self.info = info
        self._desk = desk

    def submit(self, job: int, payload: msgspec.Raw) -> None:
        """Queue a job. Raises `RequestError`."""
        self._desk.take(job, payload)

    def cancel(self, job: int) -> None:
        """Let a job go after the current step; what it has made so far is lost."""
        self._desk.drop(job)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._desk.running)


def out_of_memory(desk: Desk, numbers: Sequence[int]) -> None:
    """Fail the jobs that the device had no memory for, and give back what they held; the service lives on."""
    for number in numbers:
        desk.fail(
            number,
            "The device ran out of memory while making this image. Try again; if it happens again, ask whoever runs "
            "this server to lower max_batch or render_size of the model.",
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_JPEG_QUALITY = 92
_WEBP_QUALITY = 90
# Four times faster than Pillow's default, and 17 % larger (measured at 1024 x 1024).
_PNG_LEVEL = 1
# https://www.iptc.org/std/photometadata/specification/ : Digital Source Type
_XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" Iptc4xmpExt:DigitalSourceType='
    '"http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/></rdf:RDF></x:xmpmeta>'
    '<?xpacket end="w"?>'
)


def encode(pixels: NDArray[Any], *, size: int, output_format: ImageFormat, quality: int | None, mark: bool) -> bytes:
    """Return a file of `size` by `size` pixels of a picture (height, width, 3) with values from 0 to 1.

    `quality` is 0 to 100 for JPEG and WebP, None for ours; a PNG loses nothing at any. `mark`: metadata say that
    a model made it.
    """
    picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
    if picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    if output_format == "png":
        info = PngImagePlugin.PngInfo()
        if mark:
            info.add_itxt("XML:com.adobe.xmp", _XMP)
        picture.save(out, "PNG", compress_level=_PNG_LEVEL, pnginfo=info)
    else:
        metadata = {"xmp": _XMP.encode()} if mark else {}
        ours = _JPEG_QUALITY if output_format == "jpeg" else _WEBP_QUALITY
        picture.save(out, output_format.upper(), quality=ours if quality is None else quality, **metadata)
    return out.getvalue()


# `max_sequence_length` of the pipelines that have one: what they pad to decides the picture in some of them.
_SEQUENCE_LENGTH = {
    "Flux2KleinPipeline": 512,
    "FluxPipeline": 512,
    "QwenImagePipeline": 1024,
    "StableDiffusion3Pipeline": 256,
    "ZImagePipeline": 512,
}
# Arguments of the chat template, as the pipeline itself gives them.
_CHAT = {"ZImagePipeline": {"enable_thinking": True}, "Flux2KleinPipeline": {"enable_thinking": False}}


def sequence_length(pipe: Any) -> int | None:
    """Return the `max_sequence_length` that this pipeline is always called with, None if it knows no such thing."""
    return _SEQUENCE_LENGTH.get(type(pipe).__name__)


def check_prompt(pipe: Any, text: str, profile: ImageProfile, *, param: str) -> None:
    """Raise `RequestError` if any tokenizer of the pipeline makes more tokens of `text` than are read."""
    name = type(pipe).__name__
    for part, tokenizer in pipe.components.items():
        if not part.startswith("tokenizer") or tokenizer is None:
            continue
        limit = min(profile.max_prompt_tokens, sequence_length(pipe) or tokenizer.model_max_length)
        if "CLIP" in type(tokenizer).__name__:
            limit = min(limit, tokenizer.model_max_length)
        count = _count(tokenizer, text, _CHAT.get(name))
        if count > limit:
            raise RequestError(
                f"{param} has {count} tokens, and this model reads at most {limit} (both counted with the model's own "
                "start and end marks). Make it shorter.",
                param=param,
            )


def _count(tokenizer: Any, text: str, chat: dict[str, bool] | None) -> int:
    if chat is not None:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat)
    return len(tokenizer(text, truncation=False).input_ids)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One image with steps to go.

    Only those with equal `agrees` can share a step. `share` is the part of the memory's room that it takes, above 0
    and at most 1.
    """

    job: int
    agrees: Hashable
    share: Fraction


def share_of(max_batch: int) -> Fraction:
    """Return what one of `max_batch` images that fit together takes of the room."""
    return Fraction(1, max_batch)


def next_together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return who takes the next step; `candidates` are in the order of who has waited longest since the last one.

    The first always does, with everybody behind it who agrees and still finds room. Whoever asks again with those
    moved to the end gives each group its turn, so that a newcomer of an odd size waits for a step and not for an image.
    """
    together: list[Candidate] = []
    room = Fraction(1)
    for candidate in candidates:
        if (not together or candidate.agrees == together[0].agrees) and candidate.share <= room:
            together.append(candidate)
            room -= candidate.share
    return together

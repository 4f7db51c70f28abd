"""A job of the image service, from its payload to its one end: prompts, which go next, files."""

import io
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from engine.backends.diffusers.adapters.common import Denoising
from engine.backends.diffusers.protocol import ImageJob, ImageOptions, ImageReady
from engine.config.profiles import SIZES, ImageProfile
from engine.errors import EngineError, GenerationError, LoadError, RequestError
from engine.process.protocol import Outlet
from engine.types import FinishedImage, ImageFormat, ImageProgress, PartialImage

INVALID = "The model made no valid image of this prompt and seed. Try again with another seed."
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
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


@dataclass(slots=True)
class Running:
    """One image that was asked for. `state`: how far it is, once it has begun and if it is run step by step."""

    number: int
    job: ImageJob
    edge: int
    steps: int
    state: Denoising | None = None
    previews: int = 0


class ImageService:
    """A `Service` (engine.process.protocol.py) but for its `step`, which is batching.py's, in one of two ways.

    `running` are the jobs that have not ended, those that have waited longest first.
    """

    def __init__(self, pipe: Any, options: ImageOptions, outlet: Outlet, info: ImageReady) -> None:
        self.info = info
        self.running: dict[int, Running] = {}
        self._pipe, self._outlet = pipe, outlet
        self._profile, self._mark = options.read_profile(), options.mark

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running)

    def step(self) -> None:
        """Do one piece of work for some of the jobs."""
        raise NotImplementedError

    def submit(self, number: int, payload: msgspec.Raw, /) -> None:
        """Queue a job. Raises `RequestError` for one that this pipeline cannot do as it is asked."""
        job = msgspec.msgpack.decode(payload, type=ImageJob)
        if job.size not in SIZES:
            raise RequestError(f"size must be one of {', '.join(map(str, SIZES))}.", param="size")
        check_prompt(self._pipe, job.prompt, self._profile, param="prompt")
        if job.negative_prompt is not None:
            if not self._profile.negative_prompt:
                raise RequestError(
                    "This model takes no negative_prompt: it was made to do without. Say in the prompt what the image "
                    "should show instead.",
                    param="negative_prompt",
                )
            check_prompt(self._pipe, job.negative_prompt, self._profile, param="negative_prompt")
        edge, steps = self._profile.render_edge(job.size), self._profile.step_count(job.quality)
        self.running[number] = Running(number, job, edge, steps)

    def cancel(self, number: int, /) -> None:
        """End a job after the current step; what it has made so far is lost. One that has ended is left alone."""
        if self.running.pop(number, None) is not None:
            self._outlet.done(number)

    def rehearse(self) -> None:
        """Make a small image that is not sent. Raises `LoadError` for a model that cannot."""
        size = min(SIZES, key=self._profile.render_edge)
        outlet, self._outlet = self._outlet, (rehearsal := _Rehearsal())
        try:
            job = ImageJob(prompt="a house", size=size, quality="standard", seed=0)
            self.submit(0, msgspec.Raw(msgspec.msgpack.encode(job)))
            while self.busy:
                self.step()
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, EngineError) as error:
            raise LoadError(
                f"The pipeline was loaded, but could not make a first image ({type(error).__name__}). Check that the "
                "download is complete and that the profile is the one of this model."
            ) from error
        finally:
            self._outlet = outlet
        if rehearsal.error is not None:
            raise LoadError(
                "The pipeline was loaded, but could not make a first image. Check that the model fits the device, and "
                "that dtype is one that its authors recommend (many make no image in float16)."
            ) from rehearsal.error

    def _next_together(self, agrees: Callable[[Running], Hashable]) -> list[Running]:
        """Return the jobs that are run next in one go, among those of which `agrees` says the same."""
        candidates = [
            Candidate(running.number, agrees(running), share_of(self._profile.batch(running.job.size)))
            for running in self.running.values()
        ]
        chosen = [candidate.job for candidate in next_together(candidates)]
        for job in chosen:  # to the end of the queue: sizes that cannot share a step take turns
            self.running[job] = self.running.pop(job)
        return [self.running[job] for job in chosen]

    def _fail(self, number: int, message: str) -> None:
        """End a job whose image cannot be made; one that has ended already is left alone."""
        if self.running.pop(number, None) is not None:
            self._outlet.failed(number, GenerationError(message))

    def _fail_for_memory(self, numbers: Sequence[int]) -> None:
        """Fail the jobs that the device had no memory for, and give back what they took; the service lives on."""
        for number in numbers:
            self._fail(
                number,
                "The device ran out of memory while making this image. Try again; if it happens again, ask the "
                "operator of this server to lower max_batch or render_size of the model.",
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _finish(self, number: int, pixels: NDArray[Any], steps: int) -> None:
        """End a job with its picture, or as failed if that has anything but numbers."""
        running = self.running.get(number)
        if running is None:
            return
        if not np.isfinite(pixels).all():
            self._fail(number, INVALID)
            return
        job = running.job
        self._outlet.event(number, FinishedImage(job.index, self._file(job, pixels), job.seed, steps))
        del self.running[number]
        self._outlet.done(number)

    def _report(self, number: int, step: int, steps: int) -> None:
        """Say how far a job is, if it has not ended."""
        if (running := self.running.get(number)) is not None:
            self._outlet.event(number, ImageProgress(running.job.index, step, steps))

    def _preview(self, running: Running, pixels: NDArray[Any]) -> None:
        """Send an unfinished picture, unless that has anything but numbers."""
        if np.isfinite(pixels).all():
            file = self._file(running.job, pixels)
            self._outlet.event(running.number, PartialImage(running.job.index, running.previews, file))
            running.previews += 1

    def _file(self, job: ImageJob, pixels: NDArray[Any]) -> bytes:
        return encode(pixels, size=job.size, output_format=job.output_format, quality=job.compression, mark=self._mark)


class _Rehearsal:
    """An `Outlet` that sends nothing, and keeps what went wrong."""

    error: EngineError | None = None

    def event(self, job: int, payload: object) -> None:
        """Drop it."""

    def done(self, job: int) -> None:
        """There is only one."""

    def failed(self, job: int, error: EngineError) -> None:  # noqa: ARG002  # there is only one
        """Keep it: the model is not served then."""
        self.error = error

    def poll(self) -> None:
        """Nothing comes in."""


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
    """Return those that take the next step. `candidates`: those that have waited longest since their last one first.

    The first always does, with all behind it that agree and still fit. When those are moved to the end before the next
    call, each group gets its turn, so that a newcomer of an odd size waits for a step and not for an image.
    """
    together: list[Candidate] = []
    room = Fraction(1)
    for candidate in candidates:
        if (not together or candidate.agrees == together[0].agrees) and candidate.share <= room:
            together.append(candidate)
            room -= candidate.share
    return together


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

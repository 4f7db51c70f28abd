"""A job of the image service, from its payload to its one end. Shared by both ways of joining jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from engine.backends.diffusers_files import encode
from engine.backends.diffusers_prompts import check_prompt
from engine.config.profiles import SIZES
from engine.errors import GenerationError, RequestError
from engine.images.messages import Finished, ImageJob, Partial, Step
from engine.images.step_batch import Candidate, next_together, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import NDArray

    from engine.backends.diffusers_adapters.common import Denoising
    from engine.config.profiles import ImageProfile
    from engine.images.messages import ImageEvent
    from engine.worker.service import Outlet

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

    def take(self, number: int, payload: bytes) -> None:
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
        self._say(number, Finished(self._file(running, pixels), steps))
        del self.running[number]
        self.outlet.done(number)

    def progressed(self, number: int, step: int, steps: int) -> None:
        """Say how far a job is, if it has not ended."""
        if number in self.running:
            self._say(number, Step(step, steps))

    def preview(self, running: Running, pixels: NDArray[Any]) -> None:
        """Show an unfinished picture, unless that holds anything but numbers."""
        if np.isfinite(pixels).all():
            self._say(running.number, Partial(running.previews, self._file(running, pixels)))
            running.previews += 1

    def _file(self, running: Running, pixels: NDArray[Any]) -> bytes:
        job = running.job
        return encode(pixels, size=job.size, output_format=job.output_format, quality=job.compression, mark=self.mark)

    def _say(self, number: int, event: ImageEvent) -> None:
        self.outlet.event(number, msgspec.msgpack.encode(event))


class AtDesk:
    """What both `Service`s of images (engine/worker/service.py) do alike: whatever comes goes to the desk."""

    def __init__(self, desk: Desk, info: bytes) -> None:
        self.info = info
        self._desk = desk

    def submit(self, job: int, payload: bytes) -> None:
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

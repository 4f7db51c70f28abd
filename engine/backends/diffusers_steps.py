"""Runs jobs step by step through a family's adapter: they join and leave between any two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.backends.diffusers_adapters.common import Denoising, Order, advance
from engine.backends.diffusers_jobs import INVALID, OUT_OF_MEMORY, AtDesk, out_of_memory
from engine.backends.diffusers_prompts import sequence_length
from engine.images.previews import preview_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from engine.backends.diffusers_adapters import Adapter
    from engine.backends.diffusers_jobs import Desk, Running


class StepService(AtDesk):
    """A `Service` whose `step` is one denoising step of one group of images."""

    def __init__(self, desk: Desk, adapter: Adapter, info: bytes) -> None:
        super().__init__(desk, info)
        self._adapter = adapter

    def step(self) -> None:
        """Take one step of whoever is next, show what was asked for, deliver what is finished."""
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        mixes = self._adapter.MIXES_SIZES
        group = self._desk.next_together(lambda running: None if mixes else running.edge)
        try:
            begun = [(running, self._state(running)) for running in group]
            predictions = self._adapter.forward(self._desk.pipe, [state for _, state in begun])
            for (running, state), prediction in zip(begun, predictions, strict=True):
                advance(state, prediction)
                self._desk.progressed(running.number, state.steps_done, state.steps)
            self._show([one for one in begun if _is_to_be_shown(*one)])
            self._deliver([one for one in begun if one[1].steps_done == one[1].steps])
        except OUT_OF_MEMORY:
            out_of_memory(self._desk, [running.number for running in group])

    def _state(self, running: Running) -> Denoising:
        if running.state is None:
            running.state = self._adapter.prepare(
                self._desk.pipe,
                Order(
                    prompt=running.job.prompt,
                    negative_prompt=running.job.negative_prompt,
                    seed=running.job.seed,
                    edge=running.edge,
                    steps=running.steps,
                    guidance=self._desk.profile.guidance_scale,
                    sequence_length=sequence_length(self._desk.pipe),
                ),
            )
        return running.state

    def _show(self, begun: list[tuple[Running, Denoising]]) -> None:
        for running, pixels in self._decode(
            [(running, state.latents if state.outlook is None else state.outlook) for running, state in begun]
        ):
            self._desk.preview(running, pixels)

    def _deliver(self, begun: list[tuple[Running, Denoising]]) -> None:
        for running, state in begun:
            if not torch.isfinite(state.latents).all():
                self._desk.fail(running.number, INVALID)
        valid = [(running, state.latents) for running, state in begun if running.number in self._desk.running]
        for running, pixels in self._decode(valid):
            self._desk.deliver(running.number, pixels, running.steps)

    def _decode(self, finished: list[tuple[Running, Any]]) -> Iterator[tuple[Running, NDArray[Any]]]:
        """Those of one size are decoded together."""
        for edge in dict.fromkeys(running.edge for running, _ in finished):
            batch = [(running, latents) for running, latents in finished if running.edge == edge]
            pictures = self._adapter.decode(self._desk.pipe, torch.cat([latents for _, latents in batch]), edge)
            yield from zip((running for running, _ in batch), pictures, strict=True)


def _is_to_be_shown(running: Running, state: Denoising) -> bool:
    return state.steps_done in preview_steps(state.steps, running.job.partial_images)

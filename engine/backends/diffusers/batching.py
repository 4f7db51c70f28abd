"""Two ways to join jobs: between any two steps through a family's adapter, or in whole calls of the pipeline.

Whole calls give no previews: what a pipeline has between its steps differs from family to family.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from engine.backends.diffusers.adapters import Adapter
from engine.backends.diffusers.adapters.common import BLANK, Denoising, Order, advance, quiet, seeded
from engine.backends.diffusers.jobs import INVALID, OUT_OF_MEMORY, ImageService, Running, sequence_length
from engine.backends.diffusers.protocol import ImageOptions, ImageReady
from engine.process.protocol import Outlet


class StepService(ImageService):
    """A `Service` whose `step` is one denoising step of one group of images."""

    def __init__(self, adapter: Adapter, pipe: Any, options: ImageOptions, outlet: Outlet, info: ImageReady) -> None:
        super().__init__(pipe, options, outlet, info)
        self._adapter = adapter

    def step(self) -> None:
        """Take one step of the next group, show what was asked for, deliver what is finished."""
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        mixes = self._adapter.MIXES_SIZES
        group = self._next_together(lambda running: None if mixes else running.edge)
        try:
            begun = [(running, self._state(running)) for running in group]
            predictions = self._adapter.forward(self._pipe, [state for _, state in begun])
            for (running, state), prediction in zip(begun, predictions, strict=True):
                advance(state, prediction)
                self._report(running.number, state.steps_done, state.steps)
            self._show([one for one in begun if _is_to_be_shown(*one)])
            self._deliver([one for one in begun if one[1].steps_done == one[1].steps])
        except OUT_OF_MEMORY:
            self._fail_for_memory([running.number for running in group])

    def _state(self, running: Running) -> Denoising:
        if running.state is None:
            running.state = self._adapter.prepare(
                self._pipe,
                Order(
                    prompt=running.job.prompt,
                    negative_prompt=running.job.negative_prompt,
                    seed=running.job.seed,
                    edge=running.edge,
                    steps=running.steps,
                    guidance=self._profile.guidance_scale,
                    sequence_length=sequence_length(self._pipe),
                ),
            )
        return running.state

    def _show(self, begun: list[tuple[Running, Denoising]]) -> None:
        for running, pixels in self._decode(
            [(running, state.latents if state.outlook is None else state.outlook) for running, state in begun]
        ):
            self._preview(running, pixels)

    def _deliver(self, begun: list[tuple[Running, Denoising]]) -> None:
        for running, state in begun:
            if not torch.isfinite(state.latents).all():
                self._fail(running.number, INVALID)
        valid = [(running, state.latents) for running, state in begun if running.number in self.running]
        for running, pixels in self._decode(valid):
            self._finish(running.number, pixels, running.steps)

    def _decode(self, finished: list[tuple[Running, Any]]) -> Iterator[tuple[Running, NDArray[Any]]]:
        """Those of one size are decoded together."""
        for edge in dict.fromkeys(running.edge for running, _ in finished):
            batch = [(running, latents) for running, latents in finished if running.edge == edge]
            pictures = self._adapter.decode(self._pipe, torch.cat([latents for _, latents in batch]), edge)
            yield from zip((running for running, _ in batch), pictures, strict=True)


def _is_to_be_shown(running: Running, state: Denoising) -> bool:
    return state.steps_done in preview_steps(state.steps, running.job.partial_images)


class _AllCancelledError(Exception):
    """Ends a pipeline's call whose images are not wanted any more."""


class RequestService(ImageService):
    """A `Service` whose `step` is one call of the pipeline, which looks up after every step."""

    def __init__(self, pipe: Any, options: ImageOptions, outlet: Outlet, info: ImageReady) -> None:
        super().__init__(pipe, options, outlet, info)
        self._arguments = frozenset(inspect.signature(pipe.__call__).parameters)

    def step(self) -> None:
        """Make the images of the next group, and deliver those that are still wanted."""
        group = self._next_together(_agreement)
        numbers = [running.number for running in group]
        finished = False
        try:
            with quiet():
                pictures = self._pipe(**self._call(group)).images
            finished = True
        except _AllCancelledError:
            return
        except OUT_OF_MEMORY:
            self._fail_for_memory(numbers)
            return
        finally:
            if not finished:  # the pipelines do this themselves, but only where they reach their end
                self._pipe.maybe_free_model_hooks()
        for running, pixels in zip(group, pictures, strict=True):
            self._finish(running.number, pixels, running.steps)

    def _call(self, group: list[Running]) -> dict[str, Any]:
        """Everything by keyword: the first argument of some pipelines is no prompt."""
        first = group[0]
        arguments = {
            "prompt": [running.job.prompt for running in group],
            "height": first.edge,
            "width": first.edge,
            "num_inference_steps": first.steps,
            "generator": [seeded(running.job.seed) for running in group],
            "output_type": "np",
            "callback_on_step_end": self._watch([running.number for running in group]),
            **self._guidance(group),
        }
        if "max_sequence_length" in self._arguments and sequence_length(self._pipe) is not None:
            arguments["max_sequence_length"] = sequence_length(self._pipe)
        return arguments

    def _guidance(self, group: list[Running]) -> dict[str, Any]:
        scale = self._profile.guidance_scale
        negatives = [running.job.negative_prompt for running in group]
        if type(self._pipe).__name__ == "QwenImagePipeline":
            # Guided only against a prompt, and its authors give a blank where there is none.
            against = {"negative_prompt": [text or BLANK for text in negatives]} if scale > 1 else {}
            return {"true_cfg_scale": scale, **against}
        if "negative_prompt" in self._arguments and None not in negatives:
            return {"guidance_scale": scale, "negative_prompt": negatives}
        return {"guidance_scale": scale}

    def _watch(self, numbers: list[int]) -> Any:
        """Return what the pipeline calls after every step. It ends the call when all its jobs have been cancelled."""

        def after_step(pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            for number in numbers:
                self._report(number, step + 1, pipe.num_timesteps)
            self._outlet.poll()
            if not any(number in self.running for number in numbers):
                raise _AllCancelledError
            return tensors

        return after_step


def _agreement(running: Running) -> tuple[int, int, bool]:
    """What the jobs of one call have in common; without a negative prompt, some pipelines guide otherwise."""
    return running.edge, running.steps, running.job.negative_prompt is None


def preview_steps(steps: int, previews: int) -> tuple[int, ...]:
    """Return after how many of `steps` each preview is made: evenly spread, never twice, never after the last.

    Fewer than `previews` where there are too few steps.
    """
    return tuple(sorted({number * steps // (previews + 1) for number in range(1, previews + 1)} - {0, steps}))

"""Two ways to join jobs: between any two steps through a family's adapter, or in whole calls of the pipeline.

Whole calls give no previews: what a pipeline has between its steps differs from family to family.
"""

import inspect
from typing import Any

import torch

from engine.backends.diffusers.adapters import Adapter, Denoising, seeded
from engine.backends.diffusers.families import BLANK
from engine.backends.diffusers.jobs import OUT_OF_MEMORY, ImageService, Running
from engine.config.models import ImageProfile
from engine.process.protocol import Outlet


class StepService(ImageService):
    """A `Service` whose `step` is one denoising step of one group of images."""

    def __init__(self, adapter: Adapter, profile: ImageProfile, outlet: Outlet, *, mark: bool) -> None:
        super().__init__(adapter.pipe, profile, outlet, mark=mark)
        self._adapter = adapter

    def step(self) -> None:
        mixes = self._adapter.mixes_sizes
        group = self._next_together(lambda running: None if mixes else running.edge)
        try:
            with torch.inference_mode():
                self._step(group, [self._state(running) for running in group])
        except OUT_OF_MEMORY:
            self._fail_for_memory(group)

    def _step(self, group: list[Running], states: list[Denoising]) -> None:
        predictions = self._adapter.forward(states)
        for running, state, prediction in zip(group, states, predictions, strict=True):
            state.advance(prediction)
            self._report(running, state.steps_done, state.steps)
        for running, state in zip(group, states, strict=True):
            if state.steps_done == state.steps:
                self._finish(running, self._adapter.decode(state.latents, running.edge))
            elif state.steps_done in preview_steps(state.steps, running.job.partial_images):
                self._preview(running, self._adapter.decode(state.outlook, running.edge))

    def _state(self, running: Running) -> Denoising:
        if running.state is None:
            edge, steps, guidance = running.edge, running.steps, self._profile.guidance_scale
            running.state = self._adapter.prepare(running.job, edge=edge, steps=steps, guidance=guidance)
        return running.state


class _AllCancelledError(Exception):
    """Ends a pipeline's call whose images are not wanted any more."""


class RequestService(ImageService):
    """A `Service` whose `step` is one call of the pipeline, which looks up after every step."""

    def step(self) -> None:
        # Without a negative prompt some pipelines guide otherwise.
        group = self._next_together(lambda one: (one.edge, one.steps, one.job.negative_prompt is None))
        try:
            pictures = self._pipe(**self._call(group)).images
        except (_AllCancelledError, *OUT_OF_MEMORY) as error:
            self._pipe.maybe_free_model_hooks()  # the pipelines do this themselves, but only where they reach their end
            if not isinstance(error, _AllCancelledError):
                self._fail_for_memory(group)
            return
        for running, pixels in zip(group, pictures, strict=True):
            self._finish(running, pixels)

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
            "callback_on_step_end": self._watch(group),
            **self._guidance(group),
        }
        if self._takes("max_sequence_length") and self._family.sequence_length is not None:
            arguments["max_sequence_length"] = self._family.sequence_length
        return arguments

    def _guidance(self, group: list[Running]) -> dict[str, Any]:
        scale = self._profile.guidance_scale
        negatives = [running.job.negative_prompt for running in group]
        if type(self._pipe).__name__ == "QwenImagePipeline":
            # Guided only against a prompt, and its authors give a blank where there is none.
            against = {"negative_prompt": [text or BLANK for text in negatives]} if scale > 1 else {}
            return {"true_cfg_scale": scale, **against}
        if self._takes("negative_prompt") and None not in negatives:
            return {"guidance_scale": scale, "negative_prompt": negatives}
        return {"guidance_scale": scale}

    def _takes(self, argument: str) -> bool:
        return argument in inspect.signature(self._pipe.__call__).parameters

    def _watch(self, group: list[Running]) -> Any:
        """Return what the pipeline calls after every step. It ends the call when all its jobs have been cancelled."""

        def after_step(pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            for running in group:
                self._report(running, step + 1, pipe.num_timesteps)
            self._outlet.poll()
            if not any(running.number in self.running for running in group):
                raise _AllCancelledError
            return tensors

        return after_step


def preview_steps(steps: int, previews: int) -> tuple[int, ...]:
    """Return after which of `steps` a preview is made: at most `previews`, evenly spread, never after the last."""
    return tuple(sorted({number * steps // (previews + 1) for number in range(1, previews + 1)} - {0, steps}))

"""Runs jobs by whole calls of a pipeline, joining those that agree: without an adapter, or offloaded.

No previews: what a pipeline holds between its steps differs from family to family.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from engine.backends.diffusers_adapters.common import BLANK, quiet, seeded
from engine.backends.diffusers_jobs import OUT_OF_MEMORY, AtDesk, out_of_memory
from engine.backends.diffusers_prompts import sequence_length

if TYPE_CHECKING:
    from engine.backends.diffusers_jobs import Desk, Running


class _NobodyWaitsError(Exception):
    """Ends a pipeline's call whose images are not wanted any more."""


class RequestService(AtDesk):
    """A `Service` whose `step` is one call of the pipeline, which looks up after every step."""

    def __init__(self, desk: Desk, info: bytes) -> None:
        super().__init__(desk, info)
        self._arguments = frozenset(inspect.signature(desk.pipe.__call__).parameters)

    def step(self) -> None:
        """Make the images of whoever is next, and deliver those that are still wanted."""
        group = self._desk.next_together(_agreement)
        numbers = [running.number for running in group]
        finished = False
        try:
            with quiet():
                pictures = self._desk.pipe(**self._call(group)).images
            finished = True
        except _NobodyWaitsError:
            return
        except OUT_OF_MEMORY:
            out_of_memory(self._desk, numbers)
            return
        finally:
            if not finished:  # the pipelines do this themselves, but only where they reach their end
                self._desk.pipe.maybe_free_model_hooks()
        for running, pixels in zip(group, pictures, strict=True):
            self._desk.deliver(running.number, pixels, running.steps)

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
        if "max_sequence_length" in self._arguments and sequence_length(self._desk.pipe) is not None:
            arguments["max_sequence_length"] = sequence_length(self._desk.pipe)
        return arguments

    def _guidance(self, group: list[Running]) -> dict[str, Any]:
        scale = self._desk.profile.guidance_scale
        negatives = [running.job.negative_prompt for running in group]
        if type(self._desk.pipe).__name__ == "QwenImagePipeline":
            # Guided only against a prompt, and its authors give a blank where there is none.
            against = {"negative_prompt": [text or BLANK for text in negatives]} if scale > 1 else {}
            return {"true_cfg_scale": scale, **against}
        if "negative_prompt" in self._arguments and None not in negatives:
            return {"guidance_scale": scale, "negative_prompt": negatives}
        return {"guidance_scale": scale}

    def _watch(self, numbers: list[int]) -> Any:
        """Return what the pipeline calls after every step. It ends the call when all its jobs have been cancelled."""
        desk = self._desk

        def after_step(pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            for number in numbers:
                desk.progressed(number, step + 1, pipe.num_timesteps)
            desk.outlet.poll()
            if not any(number in desk.running for number in numbers):
                raise _NobodyWaitsError
            return tensors

        return after_step


def _agreement(running: Running) -> tuple[int, int, bool]:
    """What the jobs of one call have in common; without a negative prompt, some pipelines guide otherwise."""
    return running.edge, running.steps, running.job.negative_prompt is None

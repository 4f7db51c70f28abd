"""What golden tests of image pipelines share: a family's tiny pipeline, images made step by step, and how far apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.backends.diffusers.families import adapter_for
from engine.backends.diffusers.service import load
from engine.config.models import profile_named
from engine.types import Edit, ImageJob

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOSE = 1 / 255
OURS = "a red cube on a table"


class Pipelines:
    """The tiny pipelines in these folders, each loaded once, as the service loads it."""

    def __init__(self, folders: Callable[[str], Path]) -> None:
        self._folders = folders
        self._loaded: dict[str, Any] = {}

    def __call__(self, family: str) -> Any:
        if family not in self._loaded:
            self._loaded[family] = load(self._folders(family), profile_named("demo"))
        return self._loaded[family]


@dataclass
class Image:
    """What is made, and before which tick of the batch it joins."""

    prompt: str
    seed: int
    steps: int
    guidance: float
    negative: str | None = None
    edge: int = 64
    joins: int = 0
    edit: Edit | None = None

    @property
    def job(self) -> ImageJob:
        return ImageJob(self.prompt, self.edge, "standard", self.seed, self.negative, edit=self.edit)


@torch.inference_mode()
def by_steps(pipe: Any, images: list[Image]) -> list[np.ndarray]:
    """Every tick takes one step of all that have joined; those that are done leave."""
    adapter = adapter_for(pipe)
    assert adapter is not None
    states = [
        adapter.prepare(image.job, edge=image.edge, steps=image.steps, guidance=image.guidance) for image in images
    ]
    tick = 0
    while any(state.steps_done < state.steps for state in states):
        together = [
            state
            for image, state in zip(images, states, strict=True)
            if image.joins <= tick and state.steps_done < state.steps
        ]
        for state, prediction in zip(together, adapter.forward(together), strict=True):
            state.advance(prediction)
        tick += 1
    return [adapter.decode(state.latents, state.edge) for state in states]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """In steps of 1/255, as files have them."""
    return float(np.abs((one * 255).round() - (other * 255).round()).max()) / 255


def guidance_of(family: str) -> float:
    return {"z_image": 0.0, "flux2_klein": 1.0}.get(family, 4.0)


def guided(pipe: Any, image: Image) -> dict[str, Any]:
    """How a pipeline is told what an image is guided by."""
    if type(pipe).__name__.startswith("QwenImage"):
        against = {"negative_prompt": image.negative or " "} if image.guidance > 1 else {}
        return {"true_cfg_scale": image.guidance, **against}
    negative = {} if image.negative is None else {"negative_prompt": image.negative}
    return {"guidance_scale": image.guidance, **negative}

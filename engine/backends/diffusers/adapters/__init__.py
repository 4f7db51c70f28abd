"""One file per family of pipelines: its denoising loop taken apart, so that images join and leave between steps.

Each must make the pipeline's own pictures: tests/engine/backends/diffusers/test_diffusers_golden.py compares them.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from engine.backends.diffusers.adapters.common import Denoising, Order


class Adapter(Protocol):
    """What a file of this folder offers; the functions stand in it side by side."""

    @property
    def MIXES_SIZES(self) -> bool:  # noqa: N802  # a constant of the file
        """Whether one call of the model takes images of different sizes."""

    def suits(self, pipe: Any, /) -> bool:
        """Whether this pipeline, as it is configured, is run exactly like the family."""

    def prepare(self, pipe: Any, order: Order, /) -> Denoising:
        """Return the image before its first step, exactly as the pipeline would begin it."""

    def forward(self, pipe: Any, states: Sequence[Denoising], /) -> list[Any]:
        """Return the prediction for each in one call of the model, guided where the pipeline guides."""

    def decode(self, pipe: Any, latents: Any, edge: int, /) -> NDArray[Any]:
        """Return pictures of `edge` pixels, (n, edge, edge, 3) from 0 to 1, of latents stacked along the first axis."""


# Files of this folder. Only the one that is needed is imported: each takes seconds.
_FAMILIES = {
    "Flux2KleinPipeline": "flux2_klein",
    "QwenImagePipeline": "qwen_image",
    "StableDiffusion3Pipeline": "sd3",
    "StableDiffusionXLPipeline": "sdxl",
    "ZImagePipeline": "z_image",
}


def adapter_for(pipe: Any) -> Adapter | None:
    """Return the adapter for a pipeline, None if its requests can only be run as a whole."""
    family = _FAMILIES.get(type(pipe).__name__)
    if family is None:
        return None
    adapter = cast("Adapter", import_module(f"{__name__}.{family}"))
    return adapter if adapter.suits(pipe) else None

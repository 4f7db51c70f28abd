"""How one image pipeline is run: its profile, by name from profiles.yaml, with what models.yaml says otherwise.

Reading models.yaml is engine/config/load.py's, running the pipeline engine/backends'.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from engine.config.messages import Spec

SHIPPED = Path(__file__).with_name("profiles.yaml")
SIZES = (256, 512, 1024)

Steps = Annotated[int, Field(ge=1, le=200)]
Edge = Annotated[int, Field(ge=64, le=2048, multiple_of=64)]
Batch = Annotated[int, Field(ge=1, le=64)]
MaxPromptTokens = Annotated[int, Field(ge=1, le=4096)]
Batches = Literal["steps", "requests"]


class StepsByQuality(Spec):
    """Denoising steps."""

    standard: Steps
    """Steps of an image of quality standard."""
    hd: Steps
    """Steps of an image of quality hd."""


class RenderSizes(Spec):
    """The edge in pixels at which an image of each size is rendered; it is then resized to exactly that size."""

    small: Edge = Field(alias="256x256")
    """For small images."""
    medium: Edge = Field(alias="512x512")
    """For medium images."""
    large: Edge = Field(alias="1024x1024")
    """For large images."""


class MaxBatch(Spec):
    """Images of each size that are denoised together at most; memory decides."""

    small: Batch = Field(alias="256x256")
    """For small images."""
    medium: Batch = Field(alias="512x512")
    """For medium images."""
    large: Batch = Field(alias="1024x1024")
    """For large images."""


class ImageProfile(Spec):
    """Everything that depends on the model and not on the request; what they mean stands at `ImageEngineSpec`."""

    steps: StepsByQuality
    guidance_scale: Annotated[float, Field(ge=0, le=30)]
    render_size: RenderSizes
    max_batch: MaxBatch
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    offload: Literal["none", "model", "sequential"] = "none"
    vae_tiling: bool = False
    """Part of the profile, so that pixels never depend on the load."""
    negative_prompt: bool = False
    """It needs a guidance_scale above 1."""
    max_prompt_tokens: MaxPromptTokens
    """The pipeline would cut longer ones without a word."""
    batching: Batches = "steps"
    """By steps only where the family's adapter can."""

    def render_edge(self, size: int) -> int:
        """At which edge an image of this size is rendered."""
        return int(getattr(self.render_size, _NAMES[size]))

    def batch(self, size: int) -> int:
        """How many images of this size are denoised together."""
        return int(getattr(self.max_batch, _NAMES[size]))

    def step_count(self, quality: Literal["standard", "hd"]) -> int:
        """How many steps a quality has."""
        return self.steps.hd if quality == "hd" else self.steps.standard


_NAMES = {256: "small", 512: "medium", 1024: "large"}


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """The profiles that come with Hearth, as they are in the file."""
    return dict(yaml.safe_load(SHIPPED.read_text("utf-8")))


def profile_named(name: str, changes: dict[str, Any] | None = None) -> ImageProfile:
    """Return a shipped profile with some values replaced. Raises KeyError for an unknown name."""
    return ImageProfile.model_validate({**shipped()[name], **(changes or {})})

"""How one image pipeline is run: its profile, by name from profiles.yaml, with what models.yaml says otherwise.

Reading models.yaml is engine/config.py's, running the pipeline engine/backends'.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

SHIPPED = Path(__file__).with_name("profiles.yaml")
SIZES = (256, 512, 1024)

Steps = Annotated[int, Field(ge=1, le=200)]
Edge = Annotated[int, Field(ge=64, le=2048, multiple_of=64)]
Batch = Annotated[int, Field(ge=1, le=64)]


class Part(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class StepsByQuality(Part):
    """Denoising steps."""

    standard: Steps
    hd: Steps


class RenderSizes(Part):
    """The edge in pixels at which an image of each size is rendered; it is then resized to exactly that size."""

    small: Edge = Field(alias="256")
    medium: Edge = Field(alias="512")
    large: Edge = Field(alias="1024")


class MaxBatch(Part):
    """Images of each size that are denoised together at most; memory decides."""

    small: Batch = Field(alias="256")
    medium: Batch = Field(alias="512")
    large: Batch = Field(alias="1024")


class ImageProfile(Part):
    """Everything that depends on the model and not on the request."""

    steps: StepsByQuality
    guidance_scale: Annotated[float, Field(ge=0, le=30)]
    """Classifier-free guidance; 0 for models that were distilled to do without."""
    render_size: RenderSizes
    max_batch: MaxBatch
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """On a GPU; on a CPU it is always float32."""
    offload: Literal["none", "model", "sequential"] = "none"
    """On a GPU: model keeps only the part that is needed there, sequential only one layer at a time."""
    vae_tiling: bool = False
    """Decode in tiles: less memory, and other pixels. Part of the profile, so that it never depends on the load."""
    negative_prompt: bool = False
    """Whether requests may have one; it needs a guidance_scale above 1."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=4096)]
    """Longer prompts are refused; the pipeline would cut them without a word."""
    step_batching: bool = True
    """true: images join and leave between steps, where the family's adapter can. false: whole requests are joined."""
    licence: str = ""
    """Licence of the weights, for people."""
    repository: str | None = None
    """Where the weights come from."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """What it needs on a GPU, as its authors or users say."""

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

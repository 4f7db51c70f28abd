"""What an entry of models.yaml may say about an image model. How a pipeline is run is its profile's (engine/images)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from engine.config_document import shown
from engine.config_profiles import (
    Batches,
    ImageProfile,
    MaxBatch,
    MaxPromptTokens,
    RenderSizes,
    StepsByQuality,
    profile_named,
    shipped,
)
from engine.config_report import did_you_mean, plain_error
from engine.config_specs import CommonModelSpec
from engine.config_words import Names, Spec, StallSeconds

_DEMO_PROFILE = "demo"


class ImageEngineSpec(Spec):
    """How the model is run. Every value has a default; null means what the profile says."""

    steps: StepsByQuality | None = None
    """Denoising steps for each `quality` of a request."""
    guidance_scale: Annotated[float, Field(ge=0, le=30)] | None = None
    """Classifier-free guidance; 0 for models that were distilled to do without."""
    render_size: RenderSizes | None = None
    """The edge in pixels at which images of each size are made before they are resized to the size asked for."""
    max_batch: MaxBatch | None = None
    """Images of each size that are made together at most."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Number format on a GPU. On a CPU it is float32."""
    offload: Literal["none", "model", "sequential"] | None = None
    """What stays in the GPU's memory. none: everything; model: the part in use; sequential: the layer in use."""
    vae_tiling: bool | None = None
    """Decode large images in tiles, with less memory and slightly other pixels."""
    negative_prompt: bool | None = None
    """Whether requests may have a `negative_prompt`."""
    max_prompt_tokens: MaxPromptTokens | None = None
    """Longer prompts are refused."""
    batching: Batches | None = None
    """steps: images join and leave between denoising steps; requests: they are joined when they begin."""
    max_queued_images: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Images that may wait. The next one is answered with 503 server_overloaded."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """An image that has been in the making for longer is given up."""
    stall_seconds: StallSeconds | None = 30.0
    """A worker process that gives no sign of life for so long is killed and restarted; longer while it loads or
    computes. null: never."""
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Threads on a CPU. null: the machine's cores divided by the models (demo model: 1)."""
    fair_queue: bool = True
    """true: who waits is served by how little its key has had lately. false: first come, first served."""

    def changes(self) -> dict[str, Any]:
        """What it says otherwise than the profile."""
        named = self.model_dump(include=set(ImageProfile.model_fields), exclude_none=True, by_alias=True)
        return dict(named)


class ImageModelSpec(CommonModelSpec):
    """An image model."""

    task: Literal["image"]
    """What the model does."""
    capabilities: Names[Literal["image_generation"]]
    """What clients may ask of it."""
    profile: str
    """How such a pipeline is run: one of the profiles that come with Hearth."""
    engine: ImageEngineSpec = ImageEngineSpec()
    """How it is run otherwise than its profile says, and its queue. Every value has a default."""

    @field_validator("profile")
    @classmethod
    def _is_shipped(cls, name: str) -> str:
        if name not in shipped():
            known = ", ".join(f"`{one}`" for one in shipped())
            raise plain_error(f"there is no profile `{shown(name)}`{did_you_mean(name, shipped())}; there is {known}")
        return name

    @model_validator(mode="after")
    def _agrees_with_its_profile(self) -> ImageModelSpec:
        profile = self.profile_of(demo=False)
        if profile.negative_prompt and profile.guidance_scale <= 1:
            raise plain_error("`negative_prompt: true` needs a `guidance_scale` above 1: raise it, or say false")
        return self

    def profile_of(self, *, demo: bool) -> ImageProfile:
        """How it is run; a demo model that stands in is run in its own way."""
        return profile_named(_DEMO_PROFILE) if demo else profile_named(self.profile, self.engine.changes())

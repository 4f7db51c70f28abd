"""What the server's process and the worker of an image model say to each other: one job is one image.

The worker answers with `ImageEvent`s (engine/types.py). How messages travel is engine/process/protocol.py's.
"""

import msgspec

from engine.config.models import Batches, ImageProfile
from engine.types import ImageFormat, Quality  # msgspec reads them


class ImageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pipeline the worker loads, and how. `threads` are those of a CPU, if it runs on one."""

    folder: str
    profile: str
    """An `ImageProfile` as JSON."""
    threads: int
    mark: bool
    """Whether files say in their metadata that a model made them."""

    def read_profile(self) -> ImageProfile:
        """Return the profile."""
        return ImageProfile.model_validate_json(self.profile)


class ImageReady(msgspec.Struct, frozen=True):
    """What a loaded pipeline says of itself. `batches`: how its jobs are joined."""

    pipeline: str
    device: str
    batches: Batches


class ImageJob(msgspec.Struct, frozen=True):
    """One image to make, number `index` of its request.

    `size` is the edge of the file; the profile says at which size it is rendered.
    """

    prompt: str
    size: int
    quality: Quality
    seed: int
    negative_prompt: str | None = None
    output_format: ImageFormat = "png"
    compression: int | None = None
    partial_images: int = 0
    index: int = 0

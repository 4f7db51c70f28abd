"""What the server's process and the worker of an image model say to each other: one job is one image.

How frames travel is engine/worker's; they are msgpack by msgspec, never pickles.
"""

import msgspec

from engine.config_profiles import Batches, ImageProfile
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
    """One image to make. `size` is the edge of the file, the profile says at which size it is rendered."""

    prompt: str
    size: int
    quality: Quality
    seed: int
    negative_prompt: str | None = None
    output_format: ImageFormat = "png"
    compression: int | None = None
    partial_images: int = 0


class Step(msgspec.Struct, frozen=True, tag=True):
    """`step` of `steps` are done."""

    step: int
    steps: int


class Partial(msgspec.Struct, frozen=True, tag=True):
    """A preview, as a file."""

    number: int
    data: bytes


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The image, as a file."""

    data: bytes
    steps: int


ImageEvent = Step | Partial | Finished

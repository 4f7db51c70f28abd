"""What the server's process asks the worker of an image model, which answers with `ImageEvent`s (engine/types.py)."""

import msgspec

from engine.types import ImageFormat, Quality  # msgspec reads them


class ImageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pipeline the worker loads, and how. `mark`: whether files say in their metadata that a model made them."""

    folder: str
    profile: str
    """An `ImageProfile` as JSON."""
    mark: bool


class ImageJob(msgspec.Struct, frozen=True):
    """One image to make, number `index` of its request, with the fields of an `ImageRequest` that decide what it is.

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

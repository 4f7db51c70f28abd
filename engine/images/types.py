"""What crosses the border between the engine and whoever asks it for images: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BeforeImages: TypeAlias = "Callable[[int], Awaitable[None]]"
ImageFormat = Literal["png", "jpeg", "webp"]
Quality = Literal["standard", "hd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """`n` images of one prompt, already checked field by field.

    `size` is the edge of the square in pixels. Image `i` is made with `seed + i`, modulo 2**63; None: by chance.
    `compression` is the quality of a JPEG or WebP, 0 to 100. `partial_images`: previews of each image on the way.
    `owner`, `queue_share` and `on_turn` as in `ChatRequest`; `before_turn` is awaited with `n` once, before anything
    waits for a turn, and what it raises refuses the request.
    """

    request_id: str
    model: str
    prompt: str
    n: int = 1
    size: int = 1024
    quality: Quality = "standard"
    seed: int | None = None
    negative_prompt: str | None = None
    output_format: ImageFormat = "png"
    compression: int | None = None
    partial_images: int = 0
    owner: str = ""
    queue_share: float = 1.0
    before_turn: BeforeImages | None = None
    on_turn: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """Image `index` has `step` of `steps` behind it."""

    index: int
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class PartialImage:
    """Preview number `number` (from 0) of image `index`: a whole file in the format asked for."""

    index: int
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class FinishedImage:
    """Image `index`: a whole file in the format asked for, of exactly the size asked for."""

    index: int
    data: bytes
    seed: int
    steps: int


ImageEvent: TypeAlias = ImageProgress | PartialImage | FinishedImage

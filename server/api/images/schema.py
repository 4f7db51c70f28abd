"""The body of an image request, checked field by field, and what it means to the engine."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine import ImageRequest
from server.api.chat_schema import NoEngineFields, Strict
from server.api.dependencies import Caller
from server.validation import FieldError


class ImageStreamOptions(Strict):
    """Only together with `stream: true`."""

    include_progress: bool | None = None
    """Adds an event `image_generation.progress` for each step, which strict clients do not know."""


class ImageGenerationBody(NoEngineFields):
    """The body of `POST /v1/images/generations`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """An id from `GET /v1/models` with the capability `image_generation`."""
    prompt: Annotated[str, Field(min_length=1, max_length=1000)]
    """What the image shows."""
    n: Annotated[int, Field(ge=1, le=4)] | None = None
    """How many images. Default 1."""
    size: Literal["256x256", "512x512", "1024x1024"] | None = None
    """Default 1024x1024."""
    quality: Literal["standard", "hd"] | None = None
    """hd takes more steps. Default standard."""
    response_format: Literal["url", "b64_json"] | None = None
    """Left out: each image has both."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Image `i` is made with `seed + i`. Default: by chance."""
    negative_prompt: Annotated[str, Field(max_length=1000)] | None = None
    """What the image does not show, for models that know how."""
    output_format: Literal["png", "jpeg", "webp"] | None = None
    """Default png."""
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    """Quality of a JPEG or WebP, 100 the best."""
    stream: bool | None = None
    stream_options: ImageStreamOptions | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    """Previews of each image on the way, with `stream: true`. Default 0."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        if self.partial_images and not self.stream:
            raise FieldError("partial_images", "needs `stream: true`")
        if self.output_compression is not None and self.output_format in {None, "png"}:
            raise FieldError("output_compression", "needs `output_format` `jpeg` or `webp`: PNG loses nothing")
        return self


def to_image_request(body: ImageGenerationBody, caller: Caller) -> ImageRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it.

    The request id is ours. Raises `ApiError`.
    """
    caller.access.check(caller.key, body.model)
    return ImageRequest(
        request_id=secrets.token_hex(12),
        model=body.model,
        prompt=body.prompt,
        n=body.n or 1,
        size=int((body.size or "1024x1024").partition("x")[0]),
        quality=body.quality or "standard",
        seed=body.seed,
        negative_prompt=body.negative_prompt or None,
        output_format=body.output_format or "png",
        compression=body.output_compression,
        partial_images=body.partial_images or 0,
    )

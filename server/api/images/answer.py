"""What requests for images have in common: fields, and the answer, together or in the events of a stream.

Images are stored as files or sent as base64.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, Self

from fastapi.responses import Response
from pydantic import Field, model_validator

from engine import EditRequest, FinishedImage, GenerationError, ImageRequest, PartialImage
from engine.stream import ImageStream
from server.api.caller import Caller, event, json_response
from server.api.images.files import ImageFiles, ImageLinks, public_base_url
from server.api.schema import ModelBody, RandomSeed
from server.http.disconnect import until_disconnect
from server.validation import FieldError


class ImageBody(ModelBody):
    """What every request for images may say."""

    n: Annotated[int, Field(ge=1, le=4)] | None = None
    """How many images. Default 1."""
    size: Literal["auto", "256x256", "512x512", "1024x1024"] | None = None
    """Default, and auto: 1024x1024."""
    quality: Literal["auto", "standard", "hd", "low", "medium", "high"] | None = None
    """hd takes more steps, and high means the same. Default standard, as auto, low and medium do."""
    response_format: Literal["url", "b64_json"] | None = None
    """Left out: each image has both."""
    seed: RandomSeed | None = None
    """Image `i` is made with `seed + i`. Default: random."""
    output_format: Literal["png", "jpeg", "webp"] | None = None
    """Default png."""
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    """Quality of a JPEG or WebP, 100 the best."""
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    """Previews of each image on the way, with `stream: true`. Default 0."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.partial_images and not self.stream:
            raise FieldError("partial_images", "needs `stream: true`")
        if self.output_compression is not None and self.output_format in {None, "png"}:
            raise FieldError("output_compression", "needs `output_format` `jpeg` or `webp`: PNG loses nothing")
        return self

    def to_request(
        self, caller: Caller, *, prompt: str = "", negative_prompt: str | None = None, edit: EditRequest | None = None
    ) -> ImageRequest:
        """Say in the engine's words what it says, once it is known that the key may ask for it. Raises `ApiError`."""
        return ImageRequest(
            request_id=secrets.token_hex(12),
            model=caller.access.model_id(caller.key, self.model),
            prompt=prompt,
            n=self.n or 1,
            size=1024 if self.size in {None, "auto"} else int(self.size.partition("x")[0]),
            quality="hd" if self.quality in {"hd", "high"} else "standard",
            seed=self.seed,
            negative_prompt=negative_prompt,
            output_format=self.output_format or "png",
            compression=self.output_compression,
            partial_images=self.partial_images or 0,
            edit=edit,
        )


async def answered(caller: Caller, body: ImageBody, asked: ImageRequest, *, events: str, progress: bool) -> Response:
    """Answer with images, together or in events that are called `events`, with one for each step if `progress`."""
    caller.record.model, caller.record.stream = asked.model, bool(body.stream)
    answer = ImageAnswer(caller, body, asked, events)
    if body.stream:
        return caller.streamed(answer.events(progress=progress))
    return json_response(await until_disconnect(answer.whole(), caller.request))


class ImageAnswer:
    """The answer to one request, whole or as events of a kind; an image that was not sent is deleted."""

    def __init__(self, caller: Caller, body: ImageBody, asked: ImageRequest, kind: str) -> None:
        app = caller.request.app.state
        self._caller, self._asked, self._kind = caller, asked, kind
        self._files: ImageFiles | None = None if body.response_format == "b64_json" else app.image_files
        self._links: ImageLinks = app.image_links
        self._base_url = public_base_url(caller.request, caller.settings)
        self._base64 = body.response_format != "url"
        self._unsent: list[str] = []
        size = f"{asked.size}x{asked.size}"
        self._made_as = {"output_format": asked.output_format, "quality": asked.quality, "size": size}

    async def whole(self) -> dict[str, Any]:
        items: dict[int, dict[str, Any]] = {}
        steps = 0
        async with self._images() as images:
            async for image in images:
                if isinstance(image, FinishedImage):
                    items[image.index] = await self._item(image)
                    steps += image.steps
            if len(items) < self._asked.n:
                raise GenerationError("The model did not make all of the images. Send the request again.")
            self._unsent.clear()
        data = [item for _, item in sorted(items.items())]
        return {"created": int(time.time()), "data": data, **self._made_as, "usage": _usage(len(items), steps)}

    async def events(self, *, progress: bool) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer as they come about. Closing it aborts what is not finished."""
        async with self._images() as images:
            async for image in images:
                if isinstance(image, FinishedImage):
                    item = await self._item(image)
                    self._unsent.clear()  # the client may know the file: it stays, whatever becomes of the rest
                    yield self._event("completed", index=image.index, **item, usage=_usage(1, image.steps))
                elif isinstance(image, PartialImage):
                    yield self._event(
                        "partial_image", index=image.index, partial_image_index=image.number, b64_json=image.data
                    )
                elif progress:
                    yield event(f"{self._kind}.progress", index=image.index, step=image.step, steps=image.steps)

    @asynccontextmanager
    async def _images(self) -> AsyncIterator[ImageStream]:
        try:
            async with await self._caller.engine.images(self._asked) as images:
                yield images
        finally:
            if self._files is not None:
                self._files.discard(*self._unsent)

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = {"created_at": int(time.time()), **self._made_as, "background": "opaque"}
        return event(f"{self._kind}.{kind}", **fields, **made)

    async def _item(self, image: FinishedImage) -> dict[str, Any]:
        """Return what the answer says of this image. Raises `ApiError` where it cannot be stored."""
        item: dict[str, Any] = {"revised_prompt": self._asked.prompt, "seed": image.seed}
        if self._files is not None:
            stored = await self._files.save(image.data, self._asked.output_format)
            self._unsent.append(stored.name)
            item |= {
                "url": self._base_url + self._links.path(stored.name, stored.expires_at),
                "expires_at": stored.expires_at,
            }
        if self._base64:
            item["b64_json"] = image.data  # msgspec writes bytes as base64
        return item


def _usage(images: int, steps: int) -> dict[str, Any]:
    """Images are counted as such. The convention counts tokens, and strict clients insist on these fields."""
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    details = {"text_tokens": 0, "image_tokens": 0}
    return {"images": images, "steps": steps, **tokens, "input_tokens_details": details}

"""`POST /v1/images/generations`, and `GET /v1/images/files/{name}`, which needs a signed link and no key.

Images are stored as files or sent as base64, together or in the events of a stream. Where a file is no longer there, a
browser gets a page for people and every other client JSON.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field, model_validator
from starlette.responses import HTMLResponse

from engine import FinishedImage, GenerationError, ImageRequest, PartialImage
from engine.stream import ImageStream
from server.api.caller import Caller, CallerWith, event, json_response, of_app
from server.api.images.files import ImageFiles, ImageLinks, public_base_url
from server.api.schema import ModelBody, RandomSeed, ShortText, Strict
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.validation import FieldError

TheImageFiles = Annotated[ImageFiles, Depends(of_app("image_files"))]
TheImageLinks = Annotated[ImageLinks, Depends(of_app("image_links"))]
router = APIRouter(prefix="/v1", tags=["images"], route_class=StrictRoute)


class ImageStreamOptions(Strict):
    """Only together with `stream: true`."""

    include_progress: bool | None = None
    """Adds an event `image_generation.progress` for each step, which strict clients do not know."""


class ImageGenerationBody(ModelBody):
    """The body of `POST /v1/images/generations`."""

    model: ShortText
    """An id from `GET /v1/models` with the capability `image_generation`."""
    prompt: Annotated[str, Field(min_length=1, max_length=1000)]
    """What the image shows."""
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


def _to_image_request(body: ImageGenerationBody, caller: Caller) -> ImageRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it. Raises `ApiError`."""
    return ImageRequest(
        request_id=secrets.token_hex(12),
        model=caller.access.model_id(caller.key, body.model),
        prompt=body.prompt,
        n=body.n or 1,
        size=1024 if body.size in {None, "auto"} else int(body.size.partition("x")[0]),
        quality="hd" if body.quality in {"hd", "high"} else "standard",
        seed=body.seed,
        negative_prompt=body.negative_prompt or None,
        output_format=body.output_format or "png",
        compression=body.output_compression,
        partial_images=body.partial_images or 0,
    )


@router.post("/images/generations", response_class=Response)
async def create_images(
    body: ImageGenerationBody,
    caller: Annotated[Caller, Depends(CallerWith("images"))],
    files: TheImageFiles,
    links: TheImageLinks,
) -> Response:
    """Make images of a text, answered together or, with `stream: true`, each as soon as it is done."""
    asked = _to_image_request(body, caller)
    caller.record.model, caller.record.stream = asked.model, bool(body.stream)
    base_url = public_base_url(caller.request, caller.settings)
    answer = ImageAnswer(
        caller,
        asked,
        files=None if body.response_format == "b64_json" else files,
        link=lambda name, expires_at: base_url + links.path(name, expires_at),
        base64=body.response_format != "url",
    )
    if body.stream:
        progress = bool(body.stream_options and body.stream_options.include_progress)
        events = answer.events(progress=progress)
        return caller.streamed(events, failure=lambda error: event("error", error=error.body()))
    return json_response(await until_disconnect(answer.whole(), caller.request, caller.drain))


@dataclass
class ImageAnswer:
    """The answer to one request, whole or as events; an image that was not sent is deleted.

    `link` gives the address of a file by its name and end; None of `files` means that nothing is stored.
    """

    caller: Caller
    asked: ImageRequest
    files: ImageFiles | None
    link: Callable[[str, int], str]
    base64: bool
    _unsent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        asked, size = self.asked, self.asked.size
        self._made_as = {"output_format": asked.output_format, "quality": asked.quality, "size": f"{size}x{size}"}

    async def whole(self) -> dict[str, Any]:
        items: dict[int, dict[str, Any]] = {}
        steps = 0
        async with self._images() as images:
            async for image in images:
                if isinstance(image, FinishedImage):
                    items[image.index] = await self._item(image)
                    steps += image.steps
            if len(items) < self.asked.n:
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
                    yield event("image_generation.progress", index=image.index, step=image.step, steps=image.steps)

    @asynccontextmanager
    async def _images(self) -> AsyncIterator[ImageStream]:
        try:
            async with await self.caller.engine.images(self.asked) as images:
                yield images
        finally:
            if self.files is not None:
                self.files.discard(*self._unsent)

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = {"created_at": int(time.time()), **self._made_as, "background": "opaque"}
        return event(f"image_generation.{kind}", **fields, **made)

    async def _item(self, image: FinishedImage) -> dict[str, Any]:
        """Return what the answer says of this image. Raises `ApiError` where it cannot be stored."""
        item: dict[str, Any] = {"revised_prompt": self.asked.prompt, "seed": image.seed}
        if self.files is not None:
            stored = await self.files.save(image.data, self.asked.output_format)
            self._unsent.append(stored.name)
            item |= {"url": self.link(stored.name, stored.expires_at), "expires_at": stored.expires_at}
        if self.base64:
            item["b64_json"] = image.data  # msgspec writes bytes as base64
        return item


def _usage(images: int, steps: int) -> dict[str, Any]:
    """Images are counted as such. The convention counts tokens, and strict clients insist on these fields."""
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    details = {"text_tokens": 0, "image_tokens": 0}
    return {"images": images, "steps": steps, **tokens, "input_tokens_details": details}


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>This image is not here any more</title>
<style>body {{ font: 1rem/1.5 sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1rem }}</style>
<h1>This image is not here any more</h1>
<p>Links to images work for {hours:g} hours after an image was made; then it is deleted. This link has ended, or part of
its address is missing.</p>
<p>What to do: if the address was copied, copy all of it. Otherwise have the image made again where it was made the
first time, and save it from there.</p>
</html>
"""
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Vary": "Accept",
}


@router.head("/images/files/{name}", include_in_schema=False)
@router.get("/images/files/{name}", response_class=Response)
async def read_image_file(
    name: str,
    request: Request,
    files: TheImageFiles,
    links: TheImageLinks,
    expires: str = "",
    signature: str = "",
) -> Response:
    """Give an image to a client with the link to it, until that expires."""
    seconds = links.seconds_left(name, expires, signature)
    data = None if seconds is None else await files.read(name)
    if data is None:
        if wants_page(request.headers.get("accept", "")):
            request.state.record.error_code = "not_found"
            hours = request.app.state.settings.image_retention_hours
            return HTMLResponse(_PAGE.format(hours=hours), 404, _PAGE_HEADERS)
        message = "There is no image at this address, or its link has expired. Ask for the image again."
        raise ApiError(404, "not_found", message, headers={"Vary": "Accept"})
    headers = {
        "Cache-Control": f"private, max-age={seconds}",
        "Content-Disposition": "inline",
        "Content-Security-Policy": "default-src 'none'",
    }
    return Response(data, headers=headers, media_type=f"image/{name.rpartition('.')[2]}")


def wants_page(accept: str) -> bool:
    """Whether a browser asks for a page: it names HTML, which an `<img>` and the usual programs do not."""
    kinds = [part.partition(";") for part in accept.lower().split(",")]
    return any(kind.strip() == "text/html" and rest.replace(" ", "") != "q=0" for kind, _, rest in kinds)

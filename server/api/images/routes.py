"""`/v1/images`: images of a text (`generations`), images of pictures (`edits`, `variations`), and the files made.

Edits and variations are sent as a form. Images are stored as files or sent as base64, together or in the events of a
stream. `GET /v1/images/files/{name}` needs a signed link and no key; where a file is no longer there, a browser gets a
page for people and every other client JSON.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator
from starlette.responses import HTMLResponse

from engine import EditRequest, FinishedImage, GenerationError, ImageRequest, PartialImage
from engine.stream import ImageStream
from server.api.caller import Caller, ImageCaller, checked, event, json_response
from server.api.images.files import ImageFiles, ImageLinks, public_base_url
from server.api.schema import ModelBody, RandomSeed, Strict, described_form
from server.errors import ApiError
from server.http.bodies import Form, FormRoute, StrictRoute, field_text
from server.http.disconnect import until_disconnect
from server.validation import FieldError

router = APIRouter(prefix="/v1", tags=["images"], route_class=StrictRoute)
forms = APIRouter(prefix="/v1", tags=["images"], route_class=FormRoute)
_PICTURES = ("image", "image[]")
_PICTURE = "PNG, JPEG or WebP. Several, where the model takes them, as `image[]`."
_MASK = "As large as the picture, and transparent where it may change."
_MOST_PICTURES = 16
_LONGEST_FIELD_BYTES = 16 * 2**10
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
        """Return the engine's request, if the key may use the model. Raises `ApiError`."""
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


async def _answered(caller: Caller, body: ImageBody, asked: ImageRequest, *, events: str, progress: bool) -> Response:
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
        """Yield the events of the answer as they happen. Closing it aborts what is not finished."""
        async with self._images() as images:
            async for image in images:
                if isinstance(image, FinishedImage):
                    item = await self._item(image)
                    self._unsent.clear()  # the client may know the file, so it stays
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
        """Return this image's item in the answer. Raises `ApiError` if it cannot be stored."""
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


class ImageStreamOptions(Strict):
    """Only together with `stream: true`."""

    include_progress: bool | None = None
    """Adds an event `image_generation.progress` for each step, which strict clients do not know."""


class ImageGenerationBody(ImageBody):
    prompt: Annotated[str, Field(min_length=1, max_length=1000)]
    """What the image shows."""
    negative_prompt: Annotated[str, Field(max_length=1000)] | None = None
    """What the image does not show, for models that know how."""
    stream_options: ImageStreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        return self


@router.post("/images/generations", response_class=Response)
async def create_images(body: ImageGenerationBody, caller: ImageCaller) -> Response:
    """Make images of a text, answered together or, with `stream: true`, each as soon as it is done."""
    asked = body.to_request(caller, prompt=body.prompt, negative_prompt=body.negative_prompt or None)
    progress = bool(body.stream_options and body.stream_options.include_progress)
    return await _answered(caller, body, asked, events="image_generation", progress=progress)


class ImageVariationBody(ImageBody):
    """The fields of `POST /v1/images/variations` beside its picture."""

    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    """How much of the picture changes. Default 0.7, within a mask 1."""
    include_progress: Annotated[bool | None, Field(alias="stream_options[include_progress]")] = None
    """With `stream: true`: adds an event `image_edit.progress` for each step, which strict clients do not know."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.include_progress is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        return self


class ImageEditBody(ImageVariationBody):
    """The fields of `POST /v1/images/edits` beside its pictures."""

    prompt: Annotated[str, Field(min_length=1, max_length=1000)]
    """What the image shows when it is done."""
    negative_prompt: Annotated[str, Field(max_length=1000)] | None = None
    """What the image does not show, for models that know how."""


@forms.post(
    "/images/edits", response_class=Response, openapi_extra=described_form(ImageEditBody, image=_PICTURE, mask=_MASK)
)
async def edit_images(caller: ImageCaller) -> Response:
    """Make images of pictures, changed as a text says, as a whole or within a mask."""
    form: Form = caller.request.state.form
    body = checked(ImageEditBody, _fields(form), form=True)
    edit = _edit(form, body.strength, mask=_mask(form))
    asked = body.to_request(caller, prompt=body.prompt, negative_prompt=body.negative_prompt or None, edit=edit)
    return await _answered(caller, body, asked, events="image_edit", progress=bool(body.include_progress))


@forms.post(
    "/images/variations", response_class=Response, openapi_extra=described_form(ImageVariationBody, image=_PICTURE)
)
async def vary_image(caller: ImageCaller) -> Response:
    """Make images that are like a picture."""
    form: Form = caller.request.state.form
    body = checked(ImageVariationBody, _fields(form), form=True)
    asked = body.to_request(caller, edit=_edit(form, body.strength or 0.7))
    return await _answered(caller, body, asked, events="image_edit", progress=bool(body.include_progress))


def _edit(form: Form, strength: float | None, *, mask: bytes | None = None) -> EditRequest:
    pictures = tuple(data for name, data in form if name in _PICTURES)
    if not pictures:
        raise ApiError(400, "missing_field", "`image` is missing.", param="image")
    if len(pictures) > _MOST_PICTURES:
        raise ApiError(400, "invalid_value", f"`image` must be at most {_MOST_PICTURES} pictures.", param="image")
    names = ("image",) if len(pictures) == 1 else tuple(f"image[{index}]" for index in range(len(pictures)))
    return EditRequest(pictures=pictures, names=names, mask=mask, strength=strength)


def _mask(form: Form) -> bytes | None:
    masks = [data for name, data in form if name == "mask"]
    if len(masks) > 1:
        raise ApiError(400, "invalid_value", "`mask` must be one picture.", param="mask")
    return masks[0] if masks else None


def _fields(form: Form) -> dict[str, str]:
    pictures = {*_PICTURES, "mask"}
    return {name: field_text(name, data, _LONGEST_FIELD_BYTES) for name, data in form if name not in pictures}


@router.head("/images/files/{name}", include_in_schema=False)
@router.get("/images/files/{name}", response_class=Response)
async def read_image_file(name: str, request: Request, expires: str = "", signature: str = "") -> Response:
    """Give an image to a client with the link to it, until that expires."""
    app = request.app.state
    seconds = app.image_links.seconds_left(name, expires, signature)
    data = None if seconds is None else await app.image_files.read(name)
    if data is None:
        if wants_page(request.headers.get("accept", "")):
            request.state.record.error_code = "not_found"
            return HTMLResponse(_PAGE.format(hours=app.settings.image_retention_hours), 404, _PAGE_HEADERS)
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

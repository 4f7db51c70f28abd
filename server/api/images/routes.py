"""`POST /v1/images/generations`, and `GET /v1/images/files/{name}`, which needs a signed link and no key.

Where an image is no longer there, a browser gets a page for people and every other client JSON.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field, model_validator
from starlette.responses import HTMLResponse

from engine import ImageRequest
from server.api.caller import Caller, CallerWith, TheSettings, failure_event, of_app
from server.api.images.answer import ImageAnswer
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
    size: Literal["256x256", "512x512", "1024x1024"] | None = None
    """Default 1024x1024."""
    quality: Literal["standard", "hd"] | None = None
    """hd takes more steps. Default standard."""
    response_format: Literal["url", "b64_json"] | None = None
    """Left out: each image has both."""
    seed: RandomSeed | None = None
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


def _to_image_request(body: ImageGenerationBody, caller: Caller) -> ImageRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it. Raises `ApiError`."""
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
        asked,
        lambda: caller.engine.images(asked),
        files=None if body.response_format == "b64_json" else files,
        link=lambda name, expires_at: base_url + links.path(name, expires_at),
        base64=body.response_format != "url",
    )
    if body.stream:
        progress = bool(body.stream_options and body.stream_options.include_progress)
        return caller.streamed(answer.events(progress=progress), failure=failure_event)
    whole = await until_disconnect(answer.whole(), caller.request, caller.drain)
    return Response(whole, media_type="application/json")


@router.head("/images/files/{name}", include_in_schema=False)
@router.get("/images/files/{name}", response_class=Response)
async def read_image_file(
    name: str,
    request: Request,
    files: TheImageFiles,
    links: TheImageLinks,
    settings: TheSettings,
    expires: str = "",
    signature: str = "",
) -> Response:
    """Give an image to whoever has the link to it, until that expires."""
    seconds = links.seconds_left(name, expires, signature)
    data = None if seconds is None else await files.read(name)
    if data is None:
        if wants_page(request.headers.get("accept", "")):
            request.state.record.error_code = "not_found"
            return not_found_page(settings.image_retention_hours)
        message = "There is no image at this address, or its link has expired. Ask for the image again."
        raise ApiError(404, "not_found", message, headers={"Vary": "Accept"})
    headers = {
        "Cache-Control": f"private, max-age={seconds}",
        "Content-Disposition": "inline",
        "Content-Security-Policy": "default-src 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(data, headers=headers, media_type=f"image/{name.rpartition('.')[2]}")


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


def wants_page(accept: str) -> bool:
    """Whether a browser asks for a page: it names HTML, which an `<img>` and the usual programs do not."""
    kinds = [part.partition(";") for part in accept.lower().split(",")]
    return any(kind.strip() == "text/html" and rest.replace(" ", "") != "q=0" for kind, _, rest in kinds)


def not_found_page(retention_hours: float) -> HTMLResponse:
    """Make the page. Nothing of the request is in it."""
    headers = {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept",
    }
    return HTMLResponse(_PAGE.format(hours=retention_hours), 404, headers=headers)

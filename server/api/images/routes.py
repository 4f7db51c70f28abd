"""`POST /v1/images/generations`, and `GET /v1/images/files/{name}`, which needs a signed link and no key.

Where a file is no longer there, a browser gets a page for people and every other client JSON.
"""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator
from starlette.responses import HTMLResponse

from server.api.caller import ImageCaller
from server.api.images.answer import ImageBody, answered
from server.api.schema import Strict
from server.errors import ApiError
from server.http.routing import StrictRoute
from server.validation import FieldError

router = APIRouter(prefix="/v1", tags=["images"], route_class=StrictRoute)


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
    return await answered(caller, body, asked, events="image_generation", progress=progress)


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

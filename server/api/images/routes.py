"""`POST /v1/images/generations`, and `GET /v1/images/files/{name}`, which needs a signed link and no key.

Where an image is no longer there, a browser gets a page for people and every other client JSON.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.responses import HTMLResponse

from server.api import answering
from server.api.dependencies import Caller, CallerWith, TheSettings, of_app
from server.api.images.answer import Delivery, ImageAnswer, failed, streamed, whole
from server.api.images.files import ImageFiles
from server.api.images.links import ImageLinks, public_base_url
from server.api.images.schema import ImageGenerationBody, to_image_request
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

TheImageFiles = Annotated[ImageFiles, Depends(of_app("image_files"))]
TheImageLinks = Annotated[ImageLinks, Depends(of_app("image_links"))]
router = APIRouter(prefix="/v1", tags=["images"], route_class=StrictRoute)


@router.post("/images/generations", response_class=Response)
async def create_images(
    body: ImageGenerationBody,
    caller: Annotated[Caller, Depends(CallerWith("images"))],
    files: TheImageFiles,
    links: TheImageLinks,
) -> Response:
    """Make images of a text, answered together or, with `stream: true`, each as soon as it is done."""
    asked = to_image_request(body, caller)
    caller.record.model, caller.record.stream = asked.model, bool(body.stream)
    base_url = public_base_url(caller.request, caller.settings)
    delivery = Delivery(
        ImageAnswer(asked),
        files=None if body.response_format == "b64_json" else files,
        link=lambda name, expires_at: base_url + links.path(name, expires_at),
        base64=body.response_format != "url",
    )
    if body.stream:
        progress = bool(body.stream_options and body.stream_options.include_progress)
        events = streamed(lambda: caller.engine.images(asked), delivery, asked, progress=progress)
        return answering.streamed(caller, events, failure=failed)
    answer = await until_disconnect(whole(caller.engine.images(asked), delivery, asked), caller.request, caller.drain)
    return Response(answer, media_type="application/json")


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

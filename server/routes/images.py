"""`POST /v1/images/generations`, and `GET /v1/images/files/{name}`, which needs a signed link and no key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.bodies import StrictRoute
from server.dependencies import ImageEngine, TheAccess, TheDrain, TheImageFiles, TheImageLinks, TheSettings, key_with
from server.errors import ApiError
from server.hangup import until_hangup
from server.image_answer import Delivery, streamed, whole
from server.image_links import public_base_url
from server.image_page import gone_page, wants_page
from server.schemas.images import ImageGenerationBody, to_image_request
from server.schemas.images_answer import ImageAnswer, failed
from server.store import ApiKey
from server.streaming import StreamedResponse

if TYPE_CHECKING:
    from server.access_log import RequestRecord

router = APIRouter(prefix="/v1", tags=["images"], route_class=StrictRoute)


@router.post("/images/generations", response_class=Response)
async def create_images(
    body: ImageGenerationBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("images"))],
    engine: ImageEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
    files: TheImageFiles,
    links: TheImageLinks,
) -> Response:
    """Make images of a text, answered together or, with `stream: true`, each as soon as it is done."""
    wanted = to_image_request(body, key, access)
    record: RequestRecord = request.state.record
    record.model, record.stream = body.model, bool(body.stream)
    base_url = public_base_url(request, settings)
    delivery = Delivery(
        ImageAnswer(wanted),
        files=None if body.response_format == "b64_json" else files,
        link=lambda name, expires_at: base_url + links.path(name, expires_at),
        base64=body.response_format != "url",
    )
    if body.stream:
        progress = bool(body.stream_options and body.stream_options.include_progress)
        sent = streamed(lambda: engine.images(wanted), delivery, wanted, progress=progress)
        return StreamedResponse(
            sent,
            drain=drain,
            keep_alive_seconds=settings.keep_alive_seconds,
            failure=failed,
        )
    answer = await until_hangup(whole(engine.images(wanted), delivery, wanted), request, drain)
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
            return gone_page(settings.image_retention_hours)
        message = "There is no image at this address, or its link has expired. Ask for the image again."
        raise ApiError(404, "not_found", message, headers={"Vary": "Accept"})
    headers = {
        "Cache-Control": f"private, max-age={seconds}",
        "Content-Disposition": "inline",
        "Content-Security-Policy": "default-src 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(data, headers=headers, media_type=f"image/{name.rpartition('.')[2]}")

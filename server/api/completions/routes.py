"""`POST /v1/completions`: plain texts that a model goes on with, whole and streamed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.api.completions.answer import TextChunkEncoder, text_completion
from server.api.completions.schema import CompletionBody, to_text_request
from server.api.dependencies import ChatEngine, TheAccess, TheDrain, TheSettings, key_with
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.http.streaming import StreamedResponse, TokenEvents
from server.store import ApiKey

if TYPE_CHECKING:
    from server.observability.access_log import RequestRecord

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/completions", response_class=Response)
async def create_completion(
    body: CompletionBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("chat"))],
    engine: ChatEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
) -> Response:
    """Go on with a text, without a chat template; whole or, with `stream: true`, as server-sent events."""
    text = to_text_request(body, key, access)
    record: RequestRecord = request.state.record
    record.model, record.stream = body.model, bool(body.stream)
    id_, created = f"cmpl-{text.request_id}", int(time.time())
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        encoder = TextChunkEncoder(id_=id_, created=created, model=text.model, include_usage=include_usage)
        events = TokenEvents(lambda: engine.text(text), encoder, record)
        return StreamedResponse(events, drain=drain, keep_alive_seconds=settings.keep_alive_seconds)
    result = await until_disconnect(engine.whole(text), request, drain)
    record.answered(result)
    answer = text_completion(result, id_=id_, created=created, model=text.model)
    return Response(msgspec.json.encode(answer), media_type="application/json")

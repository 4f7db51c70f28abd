"""`POST /v1/chat/completions`, plain and streamed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.api import chat_answer
from server.api.chat_request import to_chat_request
from server.api.chat_schema import ChatCompletionBody
from server.api.dependencies import ChatEngine, TheAccess, TheDrain, TheSettings, key_with
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.http.streaming import StreamedResponse, TokenEvents
from server.store import ApiKey

if TYPE_CHECKING:
    from server.observability.access_log import RequestRecord

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/chat/completions", response_class=Response)
async def create_chat_completion(
    body: ChatCompletionBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("chat"))],
    engine: ChatEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
) -> Response:
    """Answer a conversation, whole or, with `stream: true`, as server-sent events."""
    record: RequestRecord = request.state.record
    chat = to_chat_request(body, key, access, settings)
    record.model, record.stream = body.model, bool(body.stream)
    if body.stream:
        encoder = chat_answer.ChunkEncoder(
            id_=f"chatcmpl-{chat.request_id}",
            created=int(time.time()),
            model=chat.model,
            n=chat.n,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        events = TokenEvents(lambda: engine.chat(chat), encoder, record, head=encoder.start())
        return StreamedResponse(events, drain=drain, keep_alive_seconds=settings.keep_alive_seconds)
    result = await until_disconnect(engine.whole(chat), request, drain)
    record.answered(result)
    answer = chat_answer.completion(
        result, id_=f"chatcmpl-{chat.request_id}", created=int(time.time()), model=chat.model
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")

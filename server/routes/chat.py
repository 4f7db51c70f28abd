"""`POST /v1/chat/completions`, plain and streamed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.answering import to_chat_request
from server.bodies import StrictRoute
from server.dependencies import ChatEngine, TheAccess, TheDrain, TheSettings, key_with
from server.events import AtOnce, events_of
from server.hangup import until_hangup
from server.schemas import chat_answer
from server.schemas.chat import ChatCompletionBody
from server.sse import event_stream
from server.store import ApiKey

if TYPE_CHECKING:
    from server.access_log import RequestRecord

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
    at_once = AtOnce(record)
    chat = to_chat_request(body, key, access, settings, on_step=at_once.on_step if body.stream else None)
    record.model, record.stream = body.model, bool(body.stream)
    if body.stream:
        at_once.encoder = encoder = chat_answer.ChunkEncoder(
            id_=f"chatcmpl-{chat.request_id}",
            created=int(time.time()),
            model=chat.model,
            n=chat.n,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        return event_stream(
            events_of(engine.chat_stream(chat), encoder, record, head=encoder.start()),
            drain=drain,
            keep_alive_seconds=settings.keep_alive_seconds,
            at_once=at_once,
        )
    result = await until_hangup(engine.chat(chat), request.receive, drain)
    record.answered(result)
    answer = chat_answer.completion(
        result, id_=f"chatcmpl-{chat.request_id}", created=int(time.time()), model=chat.model
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")

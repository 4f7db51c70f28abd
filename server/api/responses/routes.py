"""`POST /v1/responses`: the same answers as chat's in OpenAI's newer convention. Stateless: nothing is stored."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine import GenerationError
from server.api.chat_request import to_chat_request
from server.api.dependencies import ChatEngine, TheAccess, TheDrain, TheSettings, key_with
from server.api.responses.answer import ResponseEvents, ResponseObject
from server.api.responses.chat import named_as_sent, to_chat_body, to_conversation
from server.api.responses.schema import ResponseBody
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.http.streaming import StreamedResponse, TokenEvents
from server.store import ApiKey

if TYPE_CHECKING:
    from server.observability.access_log import RequestRecord

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/responses", response_class=Response)
async def create_response(
    body: ResponseBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("chat"))],
    engine: ChatEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
) -> Response:
    """Answer a conversation of items, whole or, with `stream: true`, as typed events. Nothing is stored."""
    conversation = to_conversation(body)
    with named_as_sent(conversation):
        chat = to_chat_request(to_chat_body(body, conversation), key, access, settings)
    record: RequestRecord = request.state.record
    record.model, record.stream = body.model, bool(body.stream)
    answer = ResponseObject(body, id_=f"resp_{chat.request_id}", created=int(time.time()))
    encoder = ResponseEvents(answer, chat.request_id)
    naming = named_as_sent(conversation)
    events = TokenEvents(lambda: engine.chat(chat), encoder, record, head=encoder.start(), naming=naming)
    if body.stream:
        return StreamedResponse(
            events,
            drain=drain,
            keep_alive_seconds=settings.keep_alive_seconds,
            failure=encoder.failed,
        )
    await until_disconnect(_read(events), request, drain)
    if encoder.response is None:
        raise GenerationError("The model gave no answer. Send the request again.")
    return Response(msgspec.json.encode(encoder.response), media_type="application/json")


async def _read(events: TokenEvents) -> None:
    """Run to the end: plain and streamed answers agree because they are made by the same events."""
    async with aclosing(aiter(events)) as pieces:
        async for _ in pieces:
            pass

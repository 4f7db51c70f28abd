"""`POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`: chat in another convention.

What is asked is answered by the same engine with the same checks and limits as chat; only the words differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.api.chat_request import to_chat_request
from server.api.dependencies import Access, ChatEngine, TheAccess, TheDrain, TheSettings, key_with
from server.api.messages.answer import EventEncoder, error_event, message
from server.api.messages.prompt import FieldNames, translate
from server.api.messages.schema import CountTokensBody, MessagesBody
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.http.streaming import StreamedResponse, TokenEvents
from server.settings import Settings
from server.store import ApiKey

if TYPE_CHECKING:
    from engine import ChatRequest
    from server.observability.access_log import RequestRecord

router = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=StrictRoute)


@router.post("", response_class=Response)
async def create_message(
    body: MessagesBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("chat"))],
    engine: ChatEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
) -> Response:
    """Answer a conversation with a message, whole or, with `stream: true`, as server-sent events."""
    chat, names = _to_chat(body, key, access, settings)
    record: RequestRecord = request.state.record
    record.model, record.stream = body.model, bool(body.stream)
    id_ = f"msg_{chat.request_id}"
    if body.stream:
        encoder = EventEncoder(id_=id_, model=chat.model)
        events = TokenEvents(lambda: engine.chat(chat), encoder, record, naming=names.as_sent())
        return StreamedResponse(
            events,
            drain=drain,
            keep_alive_seconds=settings.keep_alive_seconds,
            failure=error_event,
        )
    with names.as_sent():
        result = await until_disconnect(engine.whole(chat), request, drain)
    record.answered(result)
    answer = message(result, id_=id_, model=chat.model)
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/count_tokens", response_class=Response)
async def count_tokens(
    body: CountTokensBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("chat"))],
    engine: ChatEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
) -> Response:
    """Count the tokens that the same body would have as a prompt, tools and the model's own template included."""
    chat, names = _to_chat(body, key, access, settings)
    record: RequestRecord = request.state.record
    record.model = body.model
    with names.as_sent():
        tokens = await until_disconnect(engine.count_tokens(chat), request, drain)
    record.prompt_tokens = tokens
    return Response(msgspec.json.encode({"input_tokens": tokens}), media_type="application/json")


def _to_chat(body: CountTokensBody, key: ApiKey, access: Access, settings: Settings) -> tuple[ChatRequest, FieldNames]:
    prompt = translate(body)
    with prompt.names.as_sent():
        chat = to_chat_request(prompt.chat, key, access, settings)
    top_k = body.top_k if isinstance(body, MessagesBody) else None
    return replace(chat, top_k=top_k, continue_answer=prompt.continues), prompt.names

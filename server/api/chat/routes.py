"""`POST /v1/chat/completions`, plain and streamed."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import Response

from server.api import answering, chat_answer
from server.api.chat_request import to_chat_request
from server.api.chat_schema import ChatCompletionBody
from server.api.dependencies import ChatCaller
from server.http.routing import StrictRoute

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/chat/completions", response_class=Response)
async def create_chat_completion(body: ChatCompletionBody, caller: ChatCaller) -> Response:
    """Answer a conversation, whole or, with `stream: true`, as server-sent events."""
    chat = to_chat_request(body, caller)
    caller.record.model, caller.record.stream = chat.model, bool(body.stream)
    id_, created = f"chatcmpl-{chat.request_id}", int(time.time())
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        encoder = chat_answer.ChunkEncoder(
            id_=id_, created=created, model=chat.model, n=chat.n, include_usage=include_usage
        )
        return answering.streamed(caller, answering.token_events(caller, chat, encoder, head=encoder.start()))
    return await answering.whole(
        caller, chat, lambda result: chat_answer.completion(result, id_=id_, created=created, model=chat.model)
    )

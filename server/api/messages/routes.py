"""`POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`: chat in another convention.

What is asked is answered by the same engine with the same checks and limits as chat; only the words differ.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from fastapi.responses import Response

from engine import ChatRequest
from server.api import answering
from server.api.chat_request import to_chat_request
from server.api.dependencies import Caller, ChatCaller
from server.api.messages.answer import EventEncoder, error_event, message
from server.api.messages.prompt import FieldNames, translate
from server.api.messages.schema import CountTokensBody, MessagesBody
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

router = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=StrictRoute)


@router.post("", response_class=Response)
async def create_message(body: MessagesBody, caller: ChatCaller) -> Response:
    """Answer a conversation with a message, whole or, with `stream: true`, as server-sent events."""
    chat, names = _to_chat(body, caller)
    caller.record.model, caller.record.stream = chat.model, bool(body.stream)
    id_ = f"msg_{chat.request_id}"
    if body.stream:
        encoder = EventEncoder(id_=id_, model=chat.model)
        events = answering.token_events(caller, chat, encoder, naming=names.as_sent())
        return answering.streamed(caller, events, failure=error_event)
    return await answering.whole(
        caller, chat, lambda result: message(result, id_=id_, model=chat.model), naming=names.as_sent()
    )


@router.post("/count_tokens", response_class=Response)
async def count_tokens(body: CountTokensBody, caller: ChatCaller) -> Response:
    """Count the tokens that the same body would have as a prompt, tools and the model's own template included."""
    chat, names = _to_chat(body, caller)
    caller.record.model = chat.model
    with names.as_sent():
        tokens = await until_disconnect(caller.engine.count_tokens(chat), caller.request, caller.drain)
    caller.record.prompt_tokens = tokens
    return answering.json_response({"input_tokens": tokens})


def _to_chat(body: CountTokensBody, caller: Caller) -> tuple[ChatRequest, FieldNames]:
    prompt = translate(body)
    with prompt.names.as_sent():
        chat = to_chat_request(prompt.chat, caller)
    top_k = body.top_k if isinstance(body, MessagesBody) else None
    return replace(chat, top_k=top_k, continue_answer=prompt.continues), prompt.names

"""`POST /v1/responses`: the same answers as chat's in OpenAI's newer convention. Stateless: nothing is stored."""

from __future__ import annotations

import time
from contextlib import aclosing

from fastapi import APIRouter
from fastapi.responses import Response

from engine import GenerationError
from server.api import answering
from server.api.chat_request import to_chat_request
from server.api.dependencies import ChatCaller
from server.api.responses.answer import ResponseEvents, ResponseObject
from server.api.responses.chat import named_as_sent, to_chat_body, to_conversation
from server.api.responses.schema import ResponseBody
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.http.streaming import TokenEvents

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/responses", response_class=Response)
async def create_response(body: ResponseBody, caller: ChatCaller) -> Response:
    """Answer a conversation of items, whole or, with `stream: true`, as typed events. Nothing is stored."""
    conversation = to_conversation(body)
    with named_as_sent(conversation):
        chat = to_chat_request(to_chat_body(body, conversation), caller)
    caller.record.model, caller.record.stream = chat.model, bool(body.stream)
    answer = ResponseObject(body, id_=f"resp_{chat.request_id}", created=int(time.time()))
    encoder = ResponseEvents(answer, chat.request_id)
    events = answering.token_events(caller, chat, encoder, head=encoder.start(), naming=named_as_sent(conversation))
    if body.stream:
        return answering.streamed(caller, events, failure=encoder.failed)
    await until_disconnect(_read(events), caller.request, caller.drain)
    if encoder.response is None:
        raise GenerationError("The model gave no answer. Send the request again.")
    return answering.json_response(encoder.response)


async def _read(events: TokenEvents) -> None:
    """Run to the end: plain and streamed answers agree because they are made by the same events."""
    async with aclosing(aiter(events)) as pieces:
        async for _ in pieces:
            pass

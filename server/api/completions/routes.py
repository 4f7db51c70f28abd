"""`POST /v1/completions`: plain texts that a model goes on with, whole and streamed."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import Response

from server.api import answering
from server.api.completions.answer import TextChunkEncoder, text_completion
from server.api.completions.schema import CompletionBody, to_text_request
from server.api.dependencies import ChatCaller
from server.http.routing import StrictRoute

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/completions", response_class=Response)
async def create_completion(body: CompletionBody, caller: ChatCaller) -> Response:
    """Go on with a text, without a chat template; whole or, with `stream: true`, as server-sent events."""
    text = to_text_request(body, caller)
    caller.record.model, caller.record.stream = text.model, bool(body.stream)
    id_, created = f"cmpl-{text.request_id}", int(time.time())
    if body.stream:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        encoder = TextChunkEncoder(id_=id_, created=created, model=text.model, include_usage=include_usage)
        return answering.streamed(caller, answering.token_events(caller, text, encoder))
    return await answering.whole(
        caller, text, lambda result: text_completion(result, id_=id_, created=created, model=text.model)
    )

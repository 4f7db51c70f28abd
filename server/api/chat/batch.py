"""`POST /v1/chat/completions/batch`: many conversations in one call, each checked on its own: a bad one fails alone."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from server.api.answering import json_response
from server.api.chat_answer import usage_object
from server.api.chat_request import answer_all, total
from server.api.chat_schema import Strict
from server.api.dependencies import Caller, CallerWith
from server.errors import ApiError
from server.http.disconnect import until_hangup
from server.http.routing import StrictRoute

router = APIRouter(prefix="/v1", tags=["batch"], route_class=StrictRoute)
_ITEM = {"type": "object", "description": "A body of POST /v1/chat/completions, and `custom_id` if you like."}


class BatchBody(Strict):
    """The body of `POST /v1/chat/completions/batch`."""

    requests: Annotated[list[Annotated[Any, WithJsonSchema(_ITEM)]], Field(min_length=1)]
    """1 to 256 chat bodies. They may differ in everything, also in model; `stream` must not be true."""


@router.post("/chat/completions/batch", response_class=Response)
async def create_batch(body: BatchBody, caller: Annotated[Caller, Depends(CallerWith("batch"))]) -> Response:
    """Answer all conversations; `responses[i]` answers `requests[i]`, a failing one with an `error` of its own."""
    allowed, most = caller.engine.limits.batch_items, caller.settings.max_batch_items
    most = most if allowed is None else min(allowed, most)
    if len(body.requests) > most:
        sentence = f"`requests` must have at most {most} items. Send several batches."
        raise ApiError(400, "batch_too_large", sentence, param="requests")
    created = int(time.time())
    with caller.engine.running():
        responses = await until_hangup(answer_all(body.requests, caller), caller.request, caller.drain)
    usage = total(responses)
    failed = sum("error" in response for response in responses)
    record = caller.record
    record.items, record.failed_items = len(responses), failed
    record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    answer = {
        "id": f"batch-{secrets.token_hex(12)}",
        "object": "chat.completion.batch",
        "created": created,
        "responses": responses,
        "usage": usage_object(usage),
        "counts": {"total": len(responses), "succeeded": len(responses) - failed, "failed": failed},
    }
    return json_response(answer)

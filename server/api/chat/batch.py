"""`POST /v1/chat/completions/batch`: many conversations in one call.

The envelope of a batch. Its items are chat bodies, each checked on its own: a bad one fails alone.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from server.api.chat_answer import usage_object
from server.api.chat_request import Caller, answer_all, total
from server.api.chat_schema import Strict
from server.api.dependencies import BatchEngine, TheAccess, TheDrain, TheMeter, TheSettings, key_with
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.store import ApiKey

if TYPE_CHECKING:
    from server.observability.access_log import RequestRecord


router = APIRouter(prefix="/v1", tags=["batch"], route_class=StrictRoute)


_ITEM = {"type": "object", "description": "A body of POST /v1/chat/completions, and `custom_id` if you like."}


class BatchBody(Strict):
    """The body of `POST /v1/chat/completions/batch`."""

    requests: Annotated[list[Annotated[Any, WithJsonSchema(_ITEM)]], Field(min_length=1)]
    """1 to 256 chat bodies. They may differ in everything, also in model; `stream` must not be true."""


@router.post("/chat/completions/batch", response_class=Response)
async def create_batch(
    body: BatchBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("batch"))],
    engine: BatchEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
    meter: TheMeter,
) -> Response:
    """Answer all conversations; `responses[i]` answers `requests[i]`, a failing one with an `error` of its own."""
    allowed = meter.limiter.limits(key).batch_items
    most = settings.max_batch_items if allowed is None else min(allowed, settings.max_batch_items)
    if len(body.requests) > most:
        sentence = f"`requests` must have at most {most} items. Send several batches."
        raise ApiError(400, "batch_too_large", sentence, param="requests")
    created = int(time.time())
    caller = Caller(key, access, settings, engine)
    with engine.running():
        responses = await until_disconnect(answer_all(body.requests, caller), request, drain)
    usage = total(responses)
    failed = sum("error" in response for response in responses)
    record: RequestRecord = request.state.record
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
    return Response(msgspec.json.encode(answer), media_type="application/json")

"""`POST /v1/chat/completions/batch`: many conversations in one call."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from server.answering import Caller, answer_all, total
from server.bodies import StrictRoute
from server.dependencies import BatchEngine, TheAccess, TheDrain, TheMeter, TheSettings, key_with
from server.errors import ApiError
from server.hangup import until_hangup
from server.schemas.batch import BatchBody
from server.schemas.chat_answer import usage_object
from server.store import ApiKey

if TYPE_CHECKING:
    from server.access_log import RequestRecord

router = APIRouter(prefix="/v1", tags=["batch"], route_class=StrictRoute)


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
        responses = await until_hangup(answer_all(body.requests, caller), request, drain)
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

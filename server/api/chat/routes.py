"""`POST /v1/chat/completions`, plain and streamed, and `/v1/chat/completions/batch` for many conversations at once."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from engine import Urgency, Usage
from server.api.caller import Asker, BatchCaller, Caller, ChatCaller, checked_line, json_response
from server.api.chat_answer import ChatAnswer, usage_object
from server.api.chat_request import ChatCompletionBody, to_chat_request
from server.api.schema import Strict
from server.errors import ApiError, to_api_error
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

router = APIRouter(prefix="/v1/chat/completions", route_class=StrictRoute)
_ITEM = {"type": "object", "description": "A body of POST /v1/chat/completions, and `custom_id` if you like."}


@router.post("", response_class=Response, tags=["chat"])
async def create_chat_completion(body: ChatCompletionBody, caller: ChatCaller) -> Response:
    """Answer a conversation, whole or, with `stream: true`, as server-sent events."""
    chat = to_chat_request(body, caller)
    return await caller.answer(chat, ChatAnswer(chat, include_usage=body.include_usage), stream=body.stream)


async def answer_line(item: Any, asker: Asker) -> dict[str, Any]:
    chat = to_chat_request(checked_line(ChatCompletionBody, item), asker)
    return ChatAnswer(chat).whole(await asker.engine.whole(chat))


class BatchBody(Strict):
    requests: Annotated[list[Annotated[Any, WithJsonSchema(_ITEM)]], Field(min_length=1)]
    """1 to 256 chat bodies. They may differ in everything, also in model; `stream` must not be true."""


@router.post("/batch", response_class=Response, tags=["batch"])
async def create_batch(body: BatchBody, caller: BatchCaller) -> Response:
    """Answer all conversations; `responses[i]` answers `requests[i]`, a failing one with an `error` of its own."""
    allowed, most = caller.engine.limiter.limits.batch_items, caller.settings.max_batch_items
    most = most if allowed is None else min(allowed, most)
    if len(body.requests) > most:
        sentence = f"`requests` must have at most {most} items. Send several batches."
        raise ApiError(400, "batch_too_large", sentence, param="requests")
    created = int(time.time())
    with caller.engine.running():
        responses = await until_disconnect(_answer_all(body.requests, caller), caller.request)
    usage = _total(responses)
    failed = sum("error" in response for response in responses)
    caller.record.items, caller.record.failed_items = len(responses), failed
    caller.record.used(usage)
    answer = {
        "id": f"batch-{secrets.token_hex(12)}",
        "object": "chat.completion.batch",
        "created": created,
        "responses": responses,
        "usage": usage_object(usage),
        "counts": {"total": len(responses), "succeeded": len(responses) - failed, "failed": failed},
    }
    return json_response(answer)


async def _answer_all(items: Sequence[Any], caller: Caller) -> list[dict[str, Any]]:
    """Answer in order; they run together, as many as the engine lets in, and cancelling aborts all of them."""
    answers = []
    async with asyncio.TaskGroup() as group:
        for index, item in enumerate(items):
            answers.append(group.create_task(_answer_item(index, item, caller)))
            await asyncio.sleep(0)  # to check and render all of them in one go would hold up other requests
    return [answer.result() for answer in answers]


async def _answer_item(index: int, item: Any, caller: Caller) -> dict[str, Any]:
    custom_id = item.get("custom_id") if isinstance(item, dict) else None
    labels = {"index": index, "custom_id": custom_id if isinstance(custom_id, str) else None}
    try:
        body = _checked(item)
        chat = to_chat_request(body, replace(caller, urgency=Urgency.BATCH), place=f"requests[{index}].")
        result = await caller.engine.whole(chat)
    except Exception as error:  # noqa: BLE001  # an item's failure is its own, whatever it is
        api_error = to_api_error(error)
        id_ = f"{ChatAnswer.prefix}-{secrets.token_hex(12)}"
        return {"id": id_, **labels, "choices": [], "error": api_error.body(), "status_code": api_error.status}
    return {**ChatAnswer(chat).whole(result), **labels}


def _checked(item: Any) -> ChatCompletionBody:
    body = checked_line(ChatCompletionBody, item)  # so that both get the same errors as a single request
    custom_id = item.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and len(custom_id) <= 256):
        sentence = "`custom_id` must be a string of at most 256 characters."
        raise ApiError(400, "invalid_value", sentence, param="custom_id")
    return body


def _total(answers: Sequence[dict[str, Any]]) -> Usage:
    used = [answer["usage"] for answer in answers if "usage" in answer]
    return Usage(
        prompt_tokens=sum(usage["prompt_tokens"] for usage in used),
        completion_tokens=sum(usage["completion_tokens"] for usage in used),
        cached_tokens=sum(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in used),
    )

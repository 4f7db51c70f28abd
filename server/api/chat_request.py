"""From a checked chat body to the engine and back: what single requests and batches share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from engine import ChatRequest, Urgency, Usage
from server.api import chat_answer
from server.api.chat_schema import ChatCompletionBody
from server.api.dependencies import Caller
from server.errors import ApiError, invalid_body, to_api_error


async def answer_all(items: Sequence[Any], caller: Caller) -> list[dict[str, Any]]:
    """Answer many chat bodies at once, in their order, each on its own: a failing one is an answer with an `error`.

    They run together, as many as the engine lets in; cancelling aborts all of them.
    """
    answers = []
    async with asyncio.TaskGroup() as group:
        for index, item in enumerate(items):
            answers.append(group.create_task(_answer_item(index, item, caller)))
            await asyncio.sleep(0)  # to check and render all of them in one go would hold up everybody else
    return [answer.result() for answer in answers]


async def _answer_item(index: int, item: Any, caller: Caller) -> dict[str, Any]:
    custom_id = item.get("custom_id") if isinstance(item, dict) else None
    labels = {"index": index, "custom_id": custom_id if isinstance(custom_id, str) else None}
    id_ = f"chatcmpl-{secrets.token_hex(12)}"
    try:
        body = _checked(item)
        chat = to_chat_request(body, caller, urgency=Urgency.BATCH)
        result = await caller.engine.whole(chat)
    except Exception as error:  # noqa: BLE001  # an item's failure is its own, whatever it is
        api_error = to_api_error(error)
        return {"id": id_, **labels, "choices": [], "error": api_error.body(), "status_code": api_error.status}
    whole = chat_answer.completion(result, id_=id_, created=int(time.time()), model=body.model)
    return {**whole, **labels}


def _checked(item: Any) -> ChatCompletionBody:
    """Check one item like the body of a single request, so that both get the same errors."""
    try:
        body = ChatCompletionBody.model_validate(item)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False, include_input=False), item) from None
    if body.stream:
        raise ApiError(400, "invalid_value", "`stream` cannot be true within a batch.", param="stream")
    custom_id = item.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and len(custom_id) <= 256):
        sentence = "`custom_id` must be a string of at most 256 characters."
        raise ApiError(400, "invalid_value", sentence, param="custom_id")
    return body


def total(answers: Sequence[dict[str, Any]]) -> Usage:
    """Sum up what all answers used."""
    used = [answer["usage"] for answer in answers if "usage" in answer]
    return Usage(
        prompt_tokens=sum(usage["prompt_tokens"] for usage in used),
        completion_tokens=sum(usage["completion_tokens"] for usage in used),
        cached_tokens=sum(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in used),
    )


def to_chat_request(body: ChatCompletionBody, caller: Caller, *, urgency: Urgency = Urgency.INTERACTIVE) -> ChatRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it.

    The request id is ours: a client's never reaches the engine. Raises `ApiError`.
    """
    caller.access.check(caller.key, body.model)
    most = caller.settings.max_messages
    if len(body.messages) > most:
        sentence = f"`messages` must have at most {most} items."
        raise ApiError(400, "invalid_value", sentence, param="messages")
    tool_choice: Any = body.tool_choice
    if tool_choice is not None and not isinstance(tool_choice, str):
        tool_choice = tool_choice.model_dump()
    return ChatRequest(
        request_id=secrets.token_hex(12),
        model=body.model,
        messages=[_message(message) for message in body.messages],
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p,
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=body.stop,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=(
            None if body.response_format is None else body.response_format.model_dump(by_alias=True, exclude_none=True)
        ),
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=caller.key.public_id,  # one user's cached prompts must not be told by their speed to another
        ignore_eos=bool(body.ignore_eos),
        owner=caller.key.public_id,
        urgency=urgency,
    )


def _message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain["role"] == "assistant":
        plain.setdefault("content", None)
    return plain

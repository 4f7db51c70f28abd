"""`POST /v1/chat/completions`, plain and streamed."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine import ChatRequest
from server.bodies import StrictRoute
from server.dependencies import TheAccess, TheDrain, TheEngine, TheSettings, key_with
from server.errors import ApiError
from server.hangup import until_hangup
from server.schemas import chat_answer
from server.schemas.chat import ChatCompletionBody
from server.sse import event_stream
from server.store import ApiKey

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine import Engine
    from server.access_log import RequestRecord

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/chat/completions", response_class=Response)
async def create_chat_completion(
    body: ChatCompletionBody,
    request: Request,
    key: Annotated[ApiKey, Depends(key_with("chat"))],
    engine: TheEngine,
    access: TheAccess,
    settings: TheSettings,
    drain: TheDrain,
) -> Response:
    """Answer a conversation, whole or, with `stream: true`, as server-sent events."""
    access.model(key, body.model)
    if len(body.messages) > settings.max_messages:
        raise ApiError(
            400,
            "invalid_value",
            f"`messages` must have at most {settings.max_messages} items.",
            param="messages",
        )
    record: RequestRecord = request.state.record
    record.model, record.stream = body.model, bool(body.stream)
    chat = to_chat_request(body, key)
    if body.stream:
        encoder = chat_answer.ChunkEncoder(
            id_=f"chatcmpl-{chat.request_id}",
            created=int(time.time()),
            model=chat.model,
            n=chat.n,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        return await event_stream(
            request,
            _events(engine, chat, encoder, record),
            drain=drain,
            keep_alive_seconds=settings.keep_alive_seconds,
        )
    result = await until_hangup(engine.chat(chat), request.receive, drain)
    record.prompt_tokens = result.usage.prompt_tokens
    record.completion_tokens = result.usage.completion_tokens
    record.finish_reason = result.choices[0].finish_reason
    answer = chat_answer.completion(
        result, id_=f"chatcmpl-{chat.request_id}", created=int(time.time()), model=chat.model
    )
    return Response(answer, media_type="application/json")


async def _events(
    engine: Engine, chat: ChatRequest, encoder: chat_answer.ChunkEncoder, record: RequestRecord
) -> AsyncGenerator[bytes, None]:
    """Yield the events of one answer; the first holds the role as well as the first token."""
    head = encoder.start()
    steps = engine.chat_stream(chat)
    step = None
    try:
        async for step in steps:
            record.first_token()
            chunk = head + encoder.step(step)
            head = b""
            for delta in step.deltas:
                record.finish_reason = delta.finish_reason or record.finish_reason
            if chunk:
                yield chunk
    finally:
        if step is not None:
            record.prompt_tokens = step.usage.prompt_tokens
            record.completion_tokens = step.usage.completion_tokens
        await steps.aclose()
    if step is not None:
        yield encoder.end(step.usage)


def to_chat_request(body: ChatCompletionBody, key: ApiKey) -> ChatRequest:
    """Say in the engine's words what the body says. The request id is ours: a client's never reaches the engine."""
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
        cache_salt=key.public_id,  # one user's cached prompts must not be told by their speed to another
        ignore_eos=bool(body.ignore_eos),
    )


def _message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain["role"] == "assistant":
        plain.setdefault("content", None)
    return plain

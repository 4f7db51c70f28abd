"""From a checked chat body to the engine's request, for every endpoint that speaks chat."""

from __future__ import annotations

import secrets
from typing import Any

from engine import ChatRequest, Urgency
from server.api.chat_schema import ChatCompletionBody
from server.api.dependencies import Caller
from server.errors import ApiError


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

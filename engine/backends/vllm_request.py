"""Our chat request in the form that vLLM's serving classes take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)

from engine.backends.vllm_errors import check_answer_alone

if TYPE_CHECKING:
    from engine.types import ChatRequest

# pydantic looks for each field's default anew in each object, and inspects the signature of whatever makes one: half a
# millisecond for nothing.
_FIELDS = ChatCompletionRequest.model_fields
_MADE: dict[str, Any] = {name: field.default_factory for name, field in _FIELDS.items() if field.default_factory}
_CONSTANTS: dict[str, Any] = {
    name: field.default
    for name, field in _FIELDS.items()
    if isinstance(field.default, (bool, int, float, str, type(None))) and name not in _MADE
}


def translate(
    request: ChatRequest, *, stream: bool, context_length: int, max_output_tokens: int | None
) -> ChatCompletionRequest:
    """Build vLLM's request without validating it again: the server has checked every field already.

    Raises `ContextLengthError` when `max_tokens` alone is more than the context.
    """
    max_tokens = request.max_tokens if request.max_tokens is not None else max_output_tokens
    if request.max_tokens is not None:
        check_answer_alone(request.max_tokens, context_length)
    fields: dict[str, Any] = {
        "model": request.model,
        # Copied: vLLM's renderer changes messages in place.
        "messages": [dict(message) for message in request.messages],
        "request_id": request.request_id,
        "stream": stream,
        "max_completion_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "n": request.n,
        "stop": list(request.stop),
        "seed": request.seed,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning_effort,
        "chat_template_kwargs": request.chat_template_kwargs,
        "cache_salt": request.cache_salt,
        "user": request.owner,
        "ignore_eos": request.ignore_eos,
        "parallel_tool_calls": request.parallel_tool_calls,
        "priority": int(request.urgency),  # the lower number goes first
    }
    if request.n > 1 and request.temperature == 0:
        # vLLM refuses several greedy answers. With only the likeliest token to choose from, chance has no say either.
        fields["temperature"], fields["top_k"] = 1.0, 1
    if request.continue_answer:
        fields["add_generation_prompt"], fields["continue_final_message"] = False, True
    if request.tools:
        fields["tools"] = [ChatCompletionToolsParam.model_validate(tool) for tool in request.tools]
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.response_format is not None:
        fields["response_format"] = _response_format(request.response_format)
    defaults = {**_CONSTANTS, **{name: make() for name, make in _MADE.items()}}
    return ChatCompletionRequest.model_construct(set(fields), **(defaults | fields))


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else ChatCompletionNamedToolChoiceParam.model_validate(choice)


def _response_format(form: dict[str, Any]) -> Any:
    """Let vLLM's own field make the object: its type is a union that has grown over the versions."""
    whole = ChatCompletionRequest.model_validate({"messages": [], "response_format": form})
    return whole.response_format

"""Turns vLLM's exceptions into ours. Their texts may hold parts of a prompt or paths: none is passed on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from vllm.exceptions import GenerationError as VllmGenerationError
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from engine.errors import (
    ContextLengthError,
    EngineError,
    GenerationError,
    OverloadedError,
    RequestError,
    engine_died,
)

# Where the caller wrote what the model reads.
PromptField = Literal["messages", "prompt"]
_THEIRS: dict[PromptField, str] = {"messages": "your messages come to", "prompt": "your prompt comes to"}
_PROMPT_PARAMETERS = {"input_tokens", "input_text", "prompt"}
# vLLM's parameter -> the field that the client knows. Anything else is not named: it may not be a field of ours.
_FIELDS = {
    **{
        name: name
        for name in [
            "temperature",
            "top_p",
            "logprobs",
            "top_logprobs",
            "logit_bias",
            "max_tokens",
            "messages",
            "tools",
            "tool_choice",
            "reasoning_effort",
            "response_format",
            "seed",
            "stop",
            "n",
        ]
    },
    "chat_template": "messages",
    "tool_calls": "messages",
    "max_completion_tokens": "max_tokens",
    "structured_outputs": "response_format",
}


class TranslatedErrors:
    """`with`: raises `EngineError`s only. What is not vLLM's own passes through: it is our bug.

    `grammar_field` is the field that holds the request's JSON schemas: vLLM does not say what it refuses there.
    """

    __slots__ = ("_context_length", "_grammar_field", "_prompt_field")

    def __init__(self, context_length: int, grammar_field: str | None, prompt_field: PromptField = "messages") -> None:
        self._context_length = context_length
        self._grammar_field = grammar_field
        self._prompt_field: PromptField = prompt_field

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Say it in our words."""
        ours = None if error is None else self._ours(error)
        if ours is not None:
            raise ours from error

    def translated(self, error: Exception) -> Exception:
        """Return our error, or `error` itself where it is not vLLM's."""
        ours = self._ours(error)
        if ours is None:
            return error
        ours.__cause__ = error
        return ours

    def _ours(self, error: BaseException) -> EngineError | None:
        match error:
            case EngineError():
                return None
            case EngineDeadError():
                return engine_died()
            case GracefulHTTPError():
                sentence = "The queue of this model is full. Try again in a few seconds."
                return OverloadedError(sentence, retry_after_seconds=2)
            case VLLMClientError():
                return _request_error(error, self._context_length, self._grammar_field, self._prompt_field)
            case VllmGenerationError() | EngineGenerateError():
                return GenerationError("The model gave up on this answer. Send the request again.")
        return None


@contextmanager
def translated_template_errors() -> Iterator[None]:
    """A chat template may refuse a conversation with any of these; which one depends on the model."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(
            "The model's chat template refused this conversation. Check the order of the roles, that each message "
            "has the content that its role needs, and that no text holds the model's own marks for pictures.",
            param="messages",
        ) from error


def check_context(
    prompt_tokens: int, max_tokens: int | None, context_length: int, prompt_field: PromptField = "messages"
) -> None:
    """Refuse what cannot fit. An answer needs room for at least one token."""
    asked = prompt_tokens + (max_tokens if max_tokens is not None else 1)
    if asked <= context_length:
        return
    if max_tokens is None:
        raise ContextLengthError(
            f"This model's maximum context length is {context_length} tokens. However, {_THEIRS[prompt_field]} "
            f"{prompt_tokens} tokens, which leaves no room for an answer. Please shorten the {prompt_field}.",
            param=prompt_field,
        )
    raise ContextLengthError(
        f"This model's maximum context length is {context_length} tokens. However, you requested {asked} tokens "
        f"({prompt_tokens} in the {prompt_field}, {max_tokens} in the completion). Please shorten the {prompt_field} "
        "or ask for fewer tokens.",
        param=prompt_field,
    )


def check_answer_alone(max_tokens: int, context_length: int, prompt_field: PromptField = "messages") -> None:
    """Refuse what could not fit after the shortest of prompts, before anything is tokenised."""
    if max_tokens < context_length:
        return
    raise ContextLengthError(
        f"This model's maximum context length is {context_length} tokens. However, you requested {max_tokens} tokens "
        f"in the completion alone, which leaves no room for the {prompt_field}. Please ask for fewer tokens.",
        param="max_tokens",
    )


def _request_error(
    error: VLLMClientError, context_length: int, grammar_field: str | None, prompt_field: PromptField
) -> RequestError:
    parameter = error.parameter if isinstance(error, VLLMValidationError) else None
    if parameter in _PROMPT_PARAMETERS:
        return ContextLengthError(
            f"This model's maximum context length is {context_length} tokens. However, {_THEIRS[prompt_field]} more "
            f"than that: at least {context_length + 1} tokens. Please shorten the {prompt_field}.",
            param=prompt_field,
        )
    name = _FIELDS.get(parameter or "")
    if parameter is None and grammar_field is not None:
        return RequestError(
            f"`{grammar_field}` holds a JSON schema that cannot be followed: it is not valid, or uses keywords that "
            "are not supported.",
            param=grammar_field,
        )
    if name is None:
        return RequestError("The model cannot work with this request. Check its fields against the API page.")
    return RequestError(
        f"The model cannot work with this value of `{name}`. Check it against the API page.", param=name
    )

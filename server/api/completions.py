"""`POST /v1/completions`: plain texts that a model continues, whole and streamed: its body, its answer, its route."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine import ChatResult, ChatStep, TextRequest, TokenLogprob, Usage
from server.api import answering
from server.api.chat_answer import DONE, usage_object
from server.api.chat_schema import (
    NoEngineFields,
    Penalty,
    PositiveInt,
    StreamOptions,
    stop_sequences,
    token_biases,
)
from server.api.dependencies import Caller, ChatCaller
from server.http.routing import StrictRoute
from server.validation import FieldError

MAX_PROMPTS = 16
_MAX_ANSWERS = 16
_MAX_TOKENS_SENT = 2**18  # each is looked at here; no context is longer
_MAX_TOKEN_ID = 2**31 - 1
_DEFAULT_MAX_TOKENS = 16

Prompts = tuple[str | tuple[int, ...], ...]


def _prompts(value: Any) -> Any:
    """One text, one array of token ids, or an array of either; told apart by hand, like `content` in chat."""
    one = isinstance(value, str) or (isinstance(value, list) and bool(value) and _is_number(value[0]))
    prompts = [value] if one else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must be a string, an array of token ids, or an array of 1 to {MAX_PROMPTS} of either")
    return tuple(_prompt(prompt) for prompt in prompts)


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError("must hold texts of at least 1 character, or arrays of at least 1 token id")
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > _MAX_TOKENS_SENT:
        raise ValueError(f"must hold at most {_MAX_TOKENS_SENT} token ids in one array")
    if not all(_is_number(token) and 0 <= token <= _MAX_TOKEN_ID for token in prompt):
        raise ValueError("must hold token ids as whole numbers from 0, and nothing else in the same array")
    return tuple(prompt)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _no_echo(value: Any) -> Any:
    if value:
        raise ValueError("is not supported: put the prompt in front of the answer yourself")
    return value


def _no_suffix(value: Any) -> Any:
    if value:
        raise ValueError(
            "is not supported: write the text before and after the gap into `prompt`, with the model's own marks"
        )
    return value


class CompletionBody(NoEngineFields):
    """The body of `POST /v1/completions`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """An id from `GET /v1/models`."""
    prompt: Annotated[Any, BeforeValidator(_prompts)]
    """A text, an array of token ids, or an array of up to 16 of either. No chat template is applied."""
    max_tokens: PositiveInt | None = None
    """Upper bound on generated tokens, for each answer. Default 16."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """Higher is more random; 0 always takes the likeliest token. Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    """How many answers to each prompt. Default 1; at most 16 answers in all."""
    best_of: Annotated[int, Field(ge=1, le=8)] | None = None
    """Must be the same as `n`."""
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_sequences)] = ()
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Any, AfterValidator(token_biases)] = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """So many alternatives to each token, with their probabilities."""
    echo: Annotated[bool | None, AfterValidator(_no_echo)] = None
    suffix: Annotated[str | None, AfterValidator(_no_suffix)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    """Go on until `max_tokens`, for benchmarks."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "must be the same as `n`: answers are not made to be thrown away")
        if len(self.prompt) * (self.n or 1) > _MAX_ANSWERS:
            raise FieldError("n", f"times the number of prompts must be at most {_MAX_ANSWERS}")
        return self


def to_text_request(body: CompletionBody, caller: Caller) -> TextRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it.

    The request id is ours. Raises `ApiError`.
    """
    most = caller.access.model(caller.key, body.model).max_output_tokens
    return TextRequest(
        request_id=secrets.token_hex(12),
        model=body.model,
        prompts=body.prompt,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=body.top_p,
        n=body.n or 1,
        max_tokens=body.max_tokens or min(_DEFAULT_MAX_TOKENS, most or _DEFAULT_MAX_TOKENS),
        stop=body.stop,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        top_logprobs=body.logprobs,
        cache_salt=caller.key.public_id,  # as in chat: cached prompts are never shared between keys
        ignore_eos=bool(body.ignore_eos),
        owner=caller.key.public_id,
    )


_encode = msgspec.json.Encoder().encode


def text_completion(result: ChatResult, *, id_: str, created: int, model: str) -> dict[str, Any]:
    """Return a whole text completion, ready to be encoded."""
    return {
        "id": id_,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "text": choice.content,
                "index": choice.index,
                "logprobs": None if choice.logprobs is None else _logprobs(choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for choice in result.choices
        ],
        "usage": usage_object(result.usage),
    }


class TextChunkEncoder:
    """Encodes the steps of one streamed text completion. `id_`, `created` and `model` are the same in every chunk."""

    def __init__(self, *, id_: str, created: int, model: str, include_usage: bool) -> None:
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            _encode(id_),
            created,
            _encode(model),
        )
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._offsets: dict[int, int] = {}  # where the next token of each choice begins

    def step(self, step: ChatStep) -> bytes:
        """Return the chunks of one engine step: one for each choice that has something new."""
        parts: list[bytes] = []
        for delta in step.deltas:
            if not (delta.content or delta.logprobs or delta.finish_reason):
                continue
            logprobs = None
            if delta.logprobs is not None:
                offset = self._offsets.get(delta.index, 0)
                logprobs = _logprobs(delta.logprobs, offset)
                self._offsets[delta.index] = offset + sum(len(entry.token) for entry in delta.logprobs)
            choice = {
                "text": delta.content,
                "index": delta.index,
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
            }
            parts += (self._head, _encode(choice), self._tail)
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Return the usage chunk, if it was asked for, and the end marker."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage_object(usage)) + b"}\n\n" + DONE


def _logprobs(entries: tuple[TokenLogprob, ...], offset: int) -> dict[str, Any]:
    """Four lists of the same length; offsets count characters from the beginning of the answer."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {**{top.token: top.logprob for top in entry.top}, entry.token: entry.logprob} for entry in entries
        ],
        "text_offset": offsets,
    }


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

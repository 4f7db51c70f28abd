"""Chat and text completions, whole and streamed, many chats at once, and a model's own tokens.

`POST /v1/chat/completions`, `/v1/chat/completions/batch` and `/v1/completions`; `/tokenize` and `/detokenize`, also
below /v1, in the shapes of vLLM's server. Chunks are encoded once, one write per engine step.
"""

import asyncio
import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Self

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from engine import (
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ChatResult,
    ChatStep,
    Prompt,
    TextRequest,
    TokenLogprob,
    ToolCallDelta,
    Urgency,
    Usage,
)
from server.api.caller import Answer, Asker, BatchCaller, Caller, ChatCaller, checked, checked_line, json_response
from server.api.chat_request import ChatCompletionBody, SampledBody, to_chat_request, tool_call
from server.api.schema import INT64_MAX, MAX_TOKENS, ModelBody, Strict, TopLogprobs, refused, texts_or_token_ids
from server.errors import ApiError, to_api_error
from server.http.bodies import StrictRoute
from server.http.disconnect import until_disconnect
from server.http.streaming import error_event
from server.validation import FieldError

router = APIRouter(route_class=StrictRoute)
_ITEM = {"type": "object", "description": "A body of POST /v1/chat/completions, and `custom_id` if you like."}
_MAX_PROMPTS = 16
_MAX_ANSWERS = 16
_DEFAULT_MAX_TOKENS = 16
_MOST_CHARACTERS = 2**20  # half a second's work, on a thread
_OF_CHAT = ("model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class _CompletionAnswer(Answer):
    """The fields around the choices of chat and text completions, the same in every chunk."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, asked: ChatRequest | TextRequest, *, include_usage: bool = False) -> None:
        id_, created = f"{self.prefix}-{asked.request_id}", int(time.time())
        self._named = {"id": id_, "object": self.kind, "created": created, "model": asked.model}
        self._head = b"data: " + msgspec.json.encode({**self._named, "object": self.chunk_kind})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._n = asked.n

    def end(self, usage: Usage) -> bytes:
        """Return the usage chunk, if it was asked for, and the end marker."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        return self._head + b'],"usage":%b}\n\ndata: [DONE]\n\n' % msgspec.json.encode(_usage_object(usage))

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, result: ChatResult) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in result.choices]
        return {**self._named, "choices": choices, "usage": _usage_object(result.usage)}

    @abstractmethod
    def _choice(self, choice: ChatChoice) -> dict[str, Any]: ...

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + msgspec.json.encode(choice) + self._tail


class ChatAnswer(_CompletionAnswer):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def start(self) -> bytes:
        return b"".join(self._delta_chunk(index, {"role": "assistant", "content": ""}) for index in range(self._n))

    def step(self, step: ChatStep) -> bytes:
        """Return the chunks of one engine step. The end of a choice is a chunk of its own with an empty delta."""
        parts: list[bytes] = []
        for delta in step.deltas:
            fields: dict[str, Any] = {}
            if delta.content or delta.logprobs is not None:
                fields["content"] = delta.content
            if delta.reasoning:
                fields["reasoning_content"] = fields["reasoning"] = delta.reasoning
            if delta.tool_calls:
                fields["tool_calls"] = [_tool_call_delta(call) for call in delta.tool_calls]
            if fields:
                parts.append(self._delta_chunk(delta.index, fields, logprobs=_logprobs(delta.logprobs)))
            if delta.finish_reason is not None:
                parts.append(self._delta_chunk(delta.index, {}, finish_reason=delta.finish_reason))
        return b"".join(parts)

    def _delta_chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _choice(self, choice: ChatChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in choice.tool_calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": _logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object; details only where they are known."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts


def _tool_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **tool_call(call.id, call.name, call.arguments)}


def _logprobs(entries: Iterable[TokenLogprob] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {
        "content": [{**_logprob(entry), "top_logprobs": [_logprob(top) for top in entry.top]} for entry in entries],
        "refusal": None,
    }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}


@router.post("/v1/chat/completions", response_class=Response, tags=["chat"])
async def create_chat_completion(body: ChatCompletionBody, caller: ChatCaller) -> Response:
    """Answer a conversation, whole or, with `stream: true`, as server-sent events."""
    chat = to_chat_request(body, caller)
    return await caller.answer(chat, ChatAnswer(chat, include_usage=body.include_usage), stream=body.stream)


async def answer_chat_line(item: Any, asker: Asker) -> dict[str, Any]:
    chat = to_chat_request(checked_line(ChatCompletionBody, item), asker)
    return ChatAnswer(chat).whole(await asker.engine.whole(chat))


class ChatBatchBody(Strict):
    requests: Annotated[list[Annotated[Any, WithJsonSchema(_ITEM)]], Field(min_length=1)]
    """1 to 256 chat bodies. They may differ in everything, also in model; `stream` must not be true."""


@router.post("/v1/chat/completions/batch", response_class=Response, tags=["batch"])
async def create_batch(body: ChatBatchBody, caller: BatchCaller) -> Response:
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
        "usage": _usage_object(usage),
        "counts": {"total": len(responses), "succeeded": len(responses) - failed, "failed": failed},
    }
    return json_response(answer)


async def _answer_all(items: Sequence[Any], caller: Caller) -> list[dict[str, Any]]:
    """Return the answers in order. The items run in parallel, as admitted; cancelling aborts all of them."""
    answers = []
    async with asyncio.TaskGroup() as group:
        for index, item in enumerate(items):
            answers.append(group.create_task(_answer_item(index, item, caller)))
            await asyncio.sleep(0)  # checking and rendering all at once would delay other requests
    return [answer.result() for answer in answers]


async def _answer_item(index: int, item: Any, caller: Caller) -> dict[str, Any]:
    custom_id = item.get("custom_id") if isinstance(item, dict) else None
    labels = {"index": index, "custom_id": custom_id if isinstance(custom_id, str) else None}
    try:
        body = _checked_item(item)
        chat = to_chat_request(body, replace(caller, urgency=Urgency.BATCH), place=f"requests[{index}].")
        result = await caller.engine.whole(chat)
    except Exception as error:  # noqa: BLE001  # any failure is that of one item
        api_error = to_api_error(error)
        id_ = f"{ChatAnswer.prefix}-{secrets.token_hex(12)}"
        return {"id": id_, **labels, "choices": [], "error": api_error.body(), "status_code": api_error.status}
    return {**ChatAnswer(chat).whole(result), **labels}


def _checked_item(item: Any) -> ChatCompletionBody:
    body = checked_line(ChatCompletionBody, item)  # with the same errors as a single request
    custom_id = item.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and len(custom_id) <= 256):
        sentence = "`custom_id` must be a string of at most 256 characters."
        raise ApiError(400, "invalid_value", sentence, param="custom_id")
    return body


def _total(answers: Sequence[dict[str, Any]]) -> Usage:
    used = [answer["usage"] for answer in answers if "usage" in answer]
    details = (usage.get("completion_tokens_details") for usage in used)
    thought = [each["reasoning_tokens"] for each in details if each]
    return Usage(
        prompt_tokens=sum(usage["prompt_tokens"] for usage in used),
        completion_tokens=sum(usage["completion_tokens"] for usage in used),
        cached_tokens=sum(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in used),
        reasoning_tokens=sum(thought) if thought else None,
    )


_Prompts = Annotated[
    Any, BeforeValidator(partial(texts_or_token_ids, most=_MAX_PROMPTS, most_ids=_MAX_PROMPTS * MAX_TOKENS))
]
_no_suffix = refused(
    "is not supported: write the text before and after the gap into `prompt`, with the model's own marks", bool
)


class CompletionBody(SampledBody):
    prompt: _Prompts
    """A text, an array of token ids, or an array of up to 16 of either. No chat template is applied."""
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """Upper bound on generated tokens, for each answer. Default 16. 0 only with `echo`."""
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    """How many answers to each prompt. Default 1; at most 16 answers in all."""
    best_of: Annotated[int, Field(ge=1, le=8)] | None = None
    """Must be the same as `n`."""
    logprobs: TopLogprobs | None = None
    """How many alternatives to each token are returned, with their probabilities."""
    echo: bool | None = None
    """Begin each answer with its prompt; with `logprobs`, the probabilities of the prompt's tokens come as well."""
    prompt_logprobs: TopLogprobs | None = None
    """How many alternatives to each token of the prompt are returned, in `prompt_logprobs` of each answer."""
    suffix: Annotated[str | None, AfterValidator(_no_suffix)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "must be at least 1, or 0 with `echo: true`")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "cannot be streamed: leave `stream` out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "must be the same as `n`: no more answers are generated than returned")
        if len(self.prompt) * (self.n or 1) > _MAX_ANSWERS:
            raise FieldError("n", f"times the number of prompts must be at most {_MAX_ANSWERS}")
        return self


class TextAnswer(_CompletionAnswer):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: TextRequest, *, include_usage: bool, shows_prompt: bool) -> None:
        super().__init__(asked, include_usage=include_usage)
        self._asked, self._shows_prompt = asked, shows_prompt
        self._offsets = Counter[int]()  # where the next token of each choice begins

    def step(self, step: ChatStep) -> bytes:
        return b"".join(
            self._chunk(self._choice(delta))
            for delta in step.deltas
            if delta.content or delta.logprobs or delta.finish_reason or delta.prompt
        )

    def _choice(self, choice: ChatChoice | ChatDelta) -> dict[str, Any]:
        prompt = choice.prompt
        text = prompt.text + choice.content if prompt and self._asked.echo else choice.content
        answered = {"text": text, "index": choice.index, "logprobs": None, "finish_reason": choice.finish_reason}
        entries: list[_Entry] = [(entry.token, entry.logprob, _top(entry)) for entry in choice.logprobs or ()]
        if prompt and self._asked.echo and self._asked.top_logprobs is not None:
            entries = [*_of_prompt(prompt, self._asked.top_logprobs), *entries]
        if entries or choice.logprobs is not None:
            offsets = list(accumulate((len(token) for token, _, _ in entries), initial=self._offsets[choice.index]))
            self._offsets[choice.index] = offsets.pop()
            tokens, logprobs, top = map(list, zip(*entries, strict=True)) if entries else ([], [], [])
            answered["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": logprobs,
                "top_logprobs": top,
                "text_offset": offsets,
            }
        if prompt and self._shows_prompt:
            answered["prompt_logprobs"] = [
                {
                    str(id_): {"logprob": logprob, "rank": rank, "decoded_token": token}
                    for id_, token, logprob, rank in each.top
                }
                or None
                for each in prompt.tokens
            ]
        return answered


# A token, its log probability, and those of the likeliest tokens in its place; None for the first of a prompt.
_Entry = tuple[str, float | None, dict[str, float] | None]


def _top(entry: TokenLogprob) -> dict[str, float] | None:
    return {**{top.token: top.logprob for top in entry.top}, entry.token: entry.logprob}


def _of_prompt(prompt: Prompt, most: int) -> list[_Entry]:
    return [
        (
            each.token,
            each.logprob,
            {token: logprob for id_, token, logprob, rank in each.top if rank <= most or id_ == each.id} or None,
        )
        for each in prompt.tokens
    ]


@router.post("/v1/completions", response_class=Response, tags=["chat"])
async def create_completion(body: CompletionBody, caller: ChatCaller) -> Response:
    """Continue a text, without a chat template; whole or, with `stream: true`, as server-sent events."""
    text, answer = _text_asked(body, caller)
    return await caller.answer(text, answer, stream=body.stream)


async def answer_completion_line(item: Any, asker: Asker) -> dict[str, Any]:
    text, answer = _text_asked(checked_line(CompletionBody, item), asker)
    return answer.whole(await asker.engine.whole(text))


def _text_asked(body: CompletionBody, caller: Asker) -> tuple[TextRequest, TextAnswer]:
    most = caller.access.model(caller.key, body.model).max_output_tokens
    wanted = [each for each in (body.prompt_logprobs, body.logprobs if body.echo else None) if each is not None]
    text = TextRequest(
        **body.to_engine(caller),
        prompts=body.prompt,
        max_tokens=min(_DEFAULT_MAX_TOKENS, most or _DEFAULT_MAX_TOKENS)
        if body.max_tokens is None
        else body.max_tokens,
        top_logprobs=body.logprobs,
        prompt_logprobs=max(wanted, default=None),
        echo=bool(body.echo),
    )
    shows_prompt = body.prompt_logprobs is not None
    return text, TextAnswer(text, include_usage=body.include_usage, shows_prompt=shows_prompt)


class TokenizeBody(ModelBody):
    """The body of `POST /v1/tokenize`: a `prompt`, or `messages` and the other fields of chat that make a prompt."""

    prompt: Annotated[str, Field(max_length=_MOST_CHARACTERS)] | None = None
    messages: list[Any] | None = None
    """As in chat, like the next four."""
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Of a `prompt`: whether the tokenizer adds its own marks. Default true."""
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody):
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=MAX_TOKENS)]


@router.post("/tokenize", response_class=Response, tags=["chat"], include_in_schema=False)
@router.post("/v1/tokenize", response_class=Response, tags=["chat"])
async def tokenize(body: TokenizeBody, caller: ChatCaller) -> Response:
    """Return the tokens of a text or of a conversation. Nothing is generated."""
    model = caller.access.model_id(caller.key, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "missing_field", "Send either `prompt` or `messages`.", param="prompt")
    asked: Any = body.prompt
    if body.messages is not None:
        asked = to_chat_request(checked(ChatCompletionBody, body.model_dump(include=set(_OF_CHAT))), caller)
    caller.record.model = model
    special_tokens = body.add_special_tokens is not False
    work = caller.engine.tokenize(model, asked, special_tokens=special_tokens)
    found = await until_disconnect(work, caller.request)
    caller.record.prompt_tokens = len(found.ids)
    answer = {
        "count": len(found.ids),
        "max_model_len": found.context_length,
        "tokens": found.ids,
        "token_strs": found.tokens if body.return_token_strs else None,
    }
    return json_response(answer)


@router.post("/detokenize", response_class=Response, tags=["chat"], include_in_schema=False)
@router.post("/v1/detokenize", response_class=Response, tags=["chat"])
async def detokenize(body: DetokenizeBody, caller: ChatCaller) -> Response:
    """Return the text of these tokens."""
    caller.record.model = model = caller.access.model_id(caller.key, body.model)
    work = caller.engine.detokenize(model, body.tokens)
    return json_response({"prompt": await until_disconnect(work, caller.request)})

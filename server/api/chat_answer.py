"""What a chat request is answered with: whole answers, and chunks encoded once, one write per engine step."""

import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from engine import ChatChoice, ChatRequest, ChatResult, ChatStep, TextRequest, TokenLogprob, ToolCallDelta, Usage
from server.api.caller import Answer
from server.errors import ApiError
from server.http.streaming import error_event


class CompletionAnswer(Answer):
    """What stands around the choices of chat and text completions, the same in every chunk."""

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
        return self._head + b'],"usage":%b}\n\ndata: [DONE]\n\n' % msgspec.json.encode(usage_object(usage))

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, result: ChatResult) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in result.choices]
        return {**self._named, "choices": choices, "usage": usage_object(result.usage)}

    @abstractmethod
    def _choice(self, choice: ChatChoice) -> dict[str, Any]: ...

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + msgspec.json.encode(choice) + self._tail


class ChatAnswer(CompletionAnswer):
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


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return token counts as they go over the wire; details only where they are known."""
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


def tool_call(id_: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """Return a call as chat has it, in answers and in conversations."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **tool_call(call.id, call.name, call.arguments)}


def _logprobs(entries: Iterable[TokenLogprob] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {
        "content": [{**logprob(entry), "top_logprobs": [logprob(top) for top in entry.top]} for entry in entries],
        "refusal": None,
    }


def logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}

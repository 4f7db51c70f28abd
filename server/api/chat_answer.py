"""What a chat request is answered with: whole answers, and chunks encoded once, one write per engine step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine import (
    ChatChoice,
    ChatDelta,
    ChatResult,
    ChatStep,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def completion(result: ChatResult, *, id_: str, created: int, model: str) -> dict[str, Any]:
    """Return a whole chat completion, ready to be encoded."""
    return {
        "id": id_,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(choice) for choice in result.choices],
        "usage": usage_object(result.usage),
    }


class ChunkEncoder:
    """Encodes the steps of one streamed answer. `id_`, `created` and `model` are the same in every chunk."""

    def __init__(self, *, id_: str, created: int, model: str, n: int, include_usage: bool) -> None:
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            _encode(id_),
            created,
            _encode(model),
        )
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        # What stands around the text of nearly every chunk, by index before it.
        self._before = [self._head + b'{"index":%d,"delta":{"content":' % i for i in range(n)]
        self._after = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._include_usage = include_usage
        self._n = n

    def start(self) -> bytes:
        """Return one role chunk per choice."""
        return b"".join(
            self._chunk(
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % i
            )
            for i in range(self._n)
        )

    def step(self, step: ChatStep) -> bytes:
        """Return the chunks of one engine step. The end of a choice is a chunk of its own with an empty delta."""
        if len(step.deltas) == 1 and step.deltas[0].finish_reason is None:
            return self._content(step.deltas[0])
        parts: list[bytes] = []
        for delta in step.deltas:
            parts.append(self._content(delta))
            if delta.finish_reason is not None:
                parts.append(
                    self._chunk(
                        b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}'
                        % (delta.index, delta.finish_reason.encode())
                    )
                )
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Return the usage chunk, if it was asked for, and the end marker."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage_object(usage)) + b"}\n\n" + DONE

    def _content(self, delta: ChatDelta) -> bytes:
        if not (delta.reasoning or delta.tool_calls or delta.logprobs is not None):
            if not delta.content:
                return b""
            return self._before[delta.index] + _encode(delta.content) + self._after
        fields: dict[str, Any] = {}
        if delta.content or delta.logprobs is not None:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = fields["reasoning"] = delta.reasoning
        if delta.tool_calls:
            fields["tool_calls"] = [_tool_call_delta(call) for call in delta.tool_calls]
        return self._chunk(
            _encode(
                {
                    "index": delta.index,
                    "delta": fields,
                    "logprobs": _logprobs(delta.logprobs),
                    "finish_reason": None,
                }
            )
        )

    def _chunk(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail


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


def _choice(choice: ChatChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content or None, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = message["reasoning"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in choice.tool_calls]
    else:
        message["content"] = choice.content
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _logprobs(entries: Iterable[TokenLogprob] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {
        "content": [{**_logprob(entry), "top_logprobs": [_logprob(top) for top in entry.top]} for entry in entries],
        "refusal": None,
    }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}

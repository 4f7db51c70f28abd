"""What a text completion is answered with: whole answers, and chunks of the same shape, one write per engine step."""

from __future__ import annotations

from typing import Any

import msgspec

from engine import ChatResult, ChatStep, TokenLogprob, Usage
from server.api.chat_answer import DONE, usage_object

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

"""What `/v1/messages` answers with: whole messages, and events encoded once, one write per engine step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from engine import ChatDelta, ChatRequest, ChatResult, ChatStep, FinishReason, GenerationError, ToolCallDelta, Usage
from server.api.caller import Answer, event

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
# As they begin.
_EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageAnswer(Answer):
    """One message, whole or as events: blocks one after the other, each begun, added to, ended."""

    def __init__(self, asked: ChatRequest) -> None:
        id_ = f"msg_{asked.request_id}"
        self._named: dict[str, Any] = {"id": id_, "type": "message", "role": "assistant", "model": asked.model}
        self._begun = False
        self._index = -1  # of the newest block
        self._open: str | None = None  # the type of that block, until it has ended
        self._space = ""  # text that may turn out to be only the space before a tool call
        self._arguments: list[str] | None = None  # of the newest call
        self._finish_reason: FinishReason | None = None
        self._stop_text: str | None = None

    def whole(self, result: ChatResult) -> dict[str, Any]:
        """Return the message in one piece."""
        (choice,) = result.choices
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({**_EMPTY_BLOCKS["thinking"], "thinking": choice.reasoning})
        if choice.content.strip() or (choice.content and not choice.tool_calls):
            content.append({"type": "text", "text": choice.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in choice.tool_calls
        ]
        last_arguments = choice.tool_calls[-1].arguments if choice.tool_calls else None
        stop = _stop(choice.finish_reason, choice.stop_text, last_arguments)
        return {**self._named, "content": content, **stop, "usage": _usage(result.usage)}

    def step(self, step: ChatStep) -> bytes:
        """Return the events of one engine step; those of the first begin the message."""
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            stop = {"stop_reason": None, "stop_sequence": None}
            message = {**self._named, "content": [], **stop, "usage": _usage(step.usage)}
            events.append(event("message_start", message=message))
        for delta in step.deltas:
            events += self._delta(delta)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """Return the events that end the message. Raises `GenerationError` if the answer never finished."""
        if self._finish_reason is None:
            raise GenerationError("The model stopped in the middle of its answer. Send the request again.")
        events: list[bytes] = []
        if self._space and self._arguments is None:
            events += self._add("text", "text", self._space)
        events += self._end_block()
        arguments = None if self._arguments is None else "".join(self._arguments)
        stop = _stop(self._finish_reason, self._stop_text, arguments)
        return b"".join([*events, event("message_delta", delta=stop, usage=_usage(usage)), event("message_stop")])

    def _delta(self, delta: ChatDelta) -> Iterator[bytes]:
        if delta.reasoning:
            yield from self._add("thinking", "thinking", delta.reasoning)
        if delta.content:
            yield from self._text(delta.content)
        for call in delta.tool_calls:
            yield from self._call(call)
        self._finish_reason = delta.finish_reason or self._finish_reason
        self._stop_text = delta.stop_text or self._stop_text

    def _text(self, text: str) -> Iterator[bytes]:
        if self._open != "text":
            text = self._space + text
            self._space = ""
            if not text.strip():
                self._space = text
                return
        yield from self._add("text", "text", text)

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.id is not None:
            self._space = ""
            self._arguments = []
            yield from self._begin("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments and self._arguments is not None:
            self._arguments.append(call.arguments)
            yield from self._add("tool_use", "partial_json", call.arguments, "input_json_delta")

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_block()
        self._index += 1
        self._open = kind
        yield event("content_block_start", index=self._index, content_block=block)

    def _add(self, kind: str, name: str, piece: str, delta_type: str = "") -> Iterator[bytes]:
        if self._open != kind:
            yield from self._begin(kind, _EMPTY_BLOCKS[kind])
        delta = {"type": delta_type or f"{kind}_delta", name: piece}
        yield event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield event("content_block_stop", index=self._index)


def _usage(usage: Usage) -> dict[str, Any]:
    """Return token counts as they go over the wire: here what came out of the cache does not count as input."""
    cached = usage.cached_tokens or 0
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _stop(finish_reason: FinishReason, stop_text: str | None, last_arguments: str | None) -> dict[str, Any]:
    """Say why it ended. A forced tool's `stop` is a call too, but not one that a stop sequence cut short."""
    reason, sequence = _STOP_REASONS[finish_reason], None
    if finish_reason in {"stop", "tool_calls"}:
        if last_arguments is not None and (stop_text is None or _is_json(last_arguments)):
            reason = "tool_use"
        elif stop_text is not None:
            reason, sequence = "stop_sequence", stop_text
    return {"stop_reason": reason, "stop_sequence": sequence}


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _input(arguments: str) -> dict[str, Any]:
    """Read a call's arguments; of one that was cut off, as much as came, as clients do with a stream."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

"""What `/v1/responses` answers with: the `response` object in each of its states, and typed events, step by step.

A plain answer is what the last event would have shown. One item is open at a time: text after a tool call is a message
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine import ChatDelta, ChatStep, GenerationError, TokenLogprob, ToolCallDelta, Usage
from server.api.caller import event
from server.api.chat_answer import logprob
from server.api.responses.schema import ResponseBody
from server.errors import ApiError

_CUT_OFF = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Of each kind of item: how its id begins, how the events of its text are called, and what it has at first.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}


@dataclass(slots=True)
class _Item:
    """One item of the output while it is written."""

    kind: str
    value: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """Return the one content part of a message or of reasoning."""
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def fill(self, status: str) -> None:
        """Put the text so far into the item."""
        filled = {"arguments": "".join(self.pieces)} if self.kind == "function_call" else {"content": [self.part()]}
        self.value |= {"status": status, **filled}


class ResponseAnswer:
    """Turns engine steps into events, and keeps the items so far. `response` is set once `end` was called."""

    def __init__(self, body: ResponseBody, *, request_id: str, created: int) -> None:
        self._as_asked = {"id": f"resp_{request_id}", "object": "response", "created_at": created, **_as_asked(body)}
        self._request_id = request_id
        self._sequence_number = 0
        self._items: list[_Item] = []
        self._calls = -1  # the newest call's index
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still held back
        self._usage: Usage | None = None
        self._cut_off: str | None = None  # why there is not more, if there should have been
        self.response: dict[str, Any] | None = None

    def start(self) -> bytes:
        """Return the two events that open the stream."""
        created = self._state("in_progress")
        return self._event("response.created", response=created) + self._event("response.in_progress", response=created)

    def step(self, step: ChatStep) -> bytes:
        """Return the events of one engine step; nothing while its text is held back."""
        self._usage = step.usage
        return b"".join(self._delta(delta) for delta in step.deltas)

    def end(self, usage: Usage) -> bytes:
        """Return the events that close whatever is open, and the one that closes the response."""
        self._usage = usage
        opened = b"" if self._items else self._open("message")
        status = "completed" if self._cut_off is None else "incomplete"
        closed = self._close(status)
        self.response = self._state(status)
        return opened + closed + self._event(f"response.{status}", response=self.response)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which cannot go on."""
        for item in self._items:
            item.fill("completed" if item is not self._items[-1] else "incomplete")
        return self._event("response.failed", response=self._state("failed", error))

    def _state(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """Return the object as far as it has come. Its `error` is the one that every error of this server has."""
        return {
            **self._as_asked,
            "status": status,
            "error": None if error is None else error.body(),
            "incomplete_details": {"reason": self._cut_off} if status == "incomplete" else None,
            "output": [item.value for item in self._items],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _delta(self, delta: ChatDelta) -> bytes:
        self._cut_off = _CUT_OFF.get(delta.finish_reason or "", self._cut_off)
        parts = []
        if delta.reasoning:
            parts += [self._switch("reasoning"), self._add_text(delta.reasoning)]
        self._logprobs += [_logprob(entry) for entry in delta.logprobs or ()]
        if delta.content:
            parts += [self._switch("message"), self._add_text(delta.content)]
        parts += [self._call(piece) for piece in delta.tool_calls]
        return b"".join(parts)

    def _call(self, piece: ToolCallDelta) -> bytes:
        parts = []
        if piece.index > self._calls:
            self._calls = piece.index
            parts = [self._close("completed"), self._open("function_call", call_id=piece.id, name=piece.name)]
        elif piece.index < self._calls or self._items[-1].kind != "function_call":
            raise GenerationError("The model gave up on this answer. Send the request again.")
        if piece.arguments:
            parts.append(self._add_text(piece.arguments))
        return b"".join(parts)

    def _switch(self, kind: str) -> bytes:
        if self._items and self._items[-1].kind == kind:
            return b""
        return self._close("completed") + self._open(kind)

    def _open(self, kind: str, **fields: Any) -> bytes:
        id_ = f"{_PREFIXES[kind]}_{self._request_id}_{len(self._items)}"
        item = _Item(kind, {"id": id_, "type": kind, "status": "in_progress", **fields, **_EMPTY[kind]})
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.value)
        if kind == "function_call":
            return added
        return added + self._event("response.content_part.added", **self._place(), part=item.part())

    def _add_text(self, text: str) -> bytes:
        item = self._items[-1]
        item.pieces.append(text)
        fields: dict[str, Any] = {"delta": text}
        if item.kind == "message":
            fields["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += fields["logprobs"]
        return self._event(f"{_TEXTS[item.kind]}.delta", **self._place(), **fields)

    def _close(self, status: str) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        if item.kind == "message":
            item.logprobs += self._logprobs
            self._logprobs = []
        item.fill(status)
        place, done = self._place(), f"{_TEXTS[item.kind]}.done"
        if item.kind == "function_call":
            events = self._event(done, **place, name=item.value["name"], arguments=item.value["arguments"])
        else:
            part = item.part()
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._event(done, **place, **said) + self._event("response.content_part.done", **place, part=part)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item.value)

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item.value["id"], "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = event(kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1
        return data


def _as_asked(body: ResponseBody) -> dict[str, Any]:
    """Return the fields that repeat what was asked for."""
    tool_choice = body.tool_choice or "auto"
    form = body.text.format if body.text else None
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
        "tool_choice": tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {**_token(entry), "top_logprobs": [_token(top) for top in entry.top]}


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {**logprob(entry), "bytes": entry.bytes or ()}

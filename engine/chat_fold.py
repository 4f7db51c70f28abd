"""Puts the steps of a streamed answer together into one whole answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from engine.errors import GenerationError
from engine.types import ChatChoice, ChatDelta, ChatResult, ChatStep, FinishReason, TokenLogprob, ToolCall, Usage


async def fold(steps: AsyncIterator[ChatStep]) -> ChatResult:
    """Read `steps` to their end. Raises what they raise, and `GenerationError` if a choice never finished."""
    parts: dict[int, _Parts] = {}
    usage: Usage | None = None
    async for step in steps:
        usage = step.usage
        for delta in step.deltas:
            parts.setdefault(delta.index, _Parts()).add(delta)
    if usage is None:
        raise GenerationError("The model gave no answer. Send the request again.")
    return ChatResult(tuple(parts[index].choice(index) for index in sorted(parts)), usage)


@dataclass(slots=True)
class _Parts:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_text: str | None = None

    def add(self, delta: ChatDelta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            if piece.index not in self.calls:
                self.calls[piece.index] = (piece.id or "", piece.name or "", [])
            self.calls[piece.index][2].append(piece.arguments)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_text = delta.stop_text or self.stop_text

    def choice(self, index: int) -> ChatChoice:
        if self.finish_reason is None:
            raise GenerationError("The model stopped in the middle of its answer. Send the request again.")
        calls = (self.calls[position] for position in sorted(self.calls))
        return ChatChoice(
            index=index,
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(ToolCall(id_, name, "".join(arguments)) for id_, name, arguments in calls),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_text=self.stop_text,
        )

"""Hands the steps of one plain answer to whoever reads them, or to whoever takes them at the moment they are made."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.types import ChatStep

if TYPE_CHECKING:
    from engine.types import OnStep


class PlainSteps:
    """Steps on their way to whoever waits for them: one task. Stands where vLLM has its `RequestOutputCollector`.

    `on_step` is `ChatRequest.on_step`: to wake the task for each step costs as much as all else that a token does.
    `answer_tokens` are those of all steps that were made: they count, fetched or not.
    """

    __slots__ = ("_error", "_on_step", "_step", "_waiter", "answer_tokens")

    def __init__(self, on_step: OnStep | None = None) -> None:
        self.answer_tokens = 0
        self._on_step = on_step
        self._step: ChatStep | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: ChatStep | Exception) -> None:
        """Take a step, or what ended the request. Steps that nobody has fetched yet become one."""
        if not isinstance(item, ChatStep):
            self._error = item
        else:
            self.answer_tokens = item.usage.completion_tokens
            if self._on_step is not None and self._is_taken(item, self._on_step):
                return
            self._hold(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _hold(self, step: ChatStep) -> None:
        if self._step is None:
            self._step = step
            return
        (held,), (new,) = self._step.deltas, step.deltas
        held.content += new.content
        held.finish_reason, held.stop_text = new.finish_reason, new.stop_text
        self._step.usage = step.usage

    def _is_taken(self, step: ChatStep, on_step: OnStep) -> bool:
        """Offer it, if all before it have been dealt with: whoever fetched the last one waits for the next."""
        if self._waiter is None or self._waiter.done() or step.deltas[0].finish_reason is not None:
            return False
        try:
            return on_step(step)
        except Exception as error:  # noqa: BLE001  # ends this request, and not those behind it in vLLM's loop
            self._error = error
            return False

    async def get(self) -> ChatStep:
        """Return the next step. Raises what was put."""
        if self._step is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        step, self._step = self._step, None
        assert step is not None  # noqa: S101  # something was put
        return step

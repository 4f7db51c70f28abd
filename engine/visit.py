"""One request at the door of its model: it is here from its arrival on, and enters when its size is known.

In what order requests enter is admission.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from engine.admission import Admission
    from engine.types import ChatRequest, TextRequest


@dataclass(slots=True)
class Ticket:
    """The right to run. Whoever holds it says how many tokens the answer had before leaving."""

    answer_tokens: int = 0


class Visit:
    """One request at the door. `enter` waits for its turn; what `count` was told last must be right when it leaves."""

    def __init__(
        self, admission: Admission, request: ChatRequest | TextRequest, sequences: int, stack: AsyncExitStack
    ) -> None:
        self._admission = admission
        self._request = request
        self._sequences = sequences
        self._stack = stack
        self._ticket: Ticket | None = None

    def count(self, answer_tokens: int) -> None:
        """Note how many tokens all its answers have so far. Of one that has not entered yet there are none."""
        if self._ticket is not None:
            self._ticket.answer_tokens = answer_tokens

    async def enter(self, prompt_tokens: int, longest_answer_tokens: int) -> None:
        """Ask whoever sent it, then wait for its turn. Both numbers are of all its sequences together."""
        request = self._request
        if request.before_turn is not None:
            await request.before_turn(prompt_tokens, longest_answer_tokens)
        turn = self._admission.enter(
            request.owner,
            prompt_tokens=prompt_tokens,
            max_tokens=longest_answer_tokens // self._sequences,
            sequences=self._sequences,
            weight=request.queue_share,
            urgency=request.urgency,
        )
        self._ticket = await self._stack.enter_async_context(turn)
        if request.on_turn is not None:
            request.on_turn()

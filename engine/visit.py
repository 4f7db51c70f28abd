"""One request at the door of its model: it is here from its arrival on, and enters when its size is known.

In what order requests enter is admission.py's. No generators here: each request passes through all of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from engine.admission import Admission
    from engine.fair_queue import Claim
    from engine.types import ChatRequest, TextRequest


class Turn:
    """`async with`: waits for a claim's turn, and holds the room until the block is left.

    Whoever has it sets `answer_tokens` to how many tokens the answer had before leaving.
    """

    __slots__ = ("_admission", "_claim", "_since", "answer_tokens")

    def __init__(self, admission: Admission, claim: Claim) -> None:
        self._admission = admission
        self._claim = claim
        self.answer_tokens = 0

    async def __aenter__(self) -> Self:
        """Wait. Raises like `Admission.enter`."""
        await self.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the room back."""
        self.end(cut_off=kind is not None)

    async def begin(self) -> None:
        """Wait for the turn, which lasts until `end`. Raises like `Admission.enter`."""
        self._since = await self._admission.take_turn(self._claim)

    def end(self, *, cut_off: bool) -> None:
        """Give the room back. How long an answer took that was cut off is not remembered."""
        self._admission.end_turn(self._claim, self.answer_tokens, None if cut_off else self._since)


class Visit:
    """`async with`: one request is here. `enter` waits for its turn.

    What `count` was told last must be right when the block is left. Raises `OverloadedError` when that is entered.
    """

    __slots__ = ("_admission", "_request", "_sequences", "_turn")

    def __init__(self, admission: Admission, request: ChatRequest | TextRequest, sequences: int) -> None:
        self._admission = admission
        self._request = request
        self._sequences = sequences
        self._turn: Turn | None = None  # from when on it has entered

    async def __aenter__(self) -> Self:
        """It arrives."""
        self._admission.arrive(self._request)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """It has ended, whether it entered or not."""
        try:
            if self._turn is not None:
                self._turn.end(cut_off=kind is not None)
        finally:
            self._admission.depart(self._request)

    def count(self, answer_tokens: int) -> None:
        """Note how many tokens all its answers have so far. Of one that has not entered yet there are none."""
        if self._turn is not None:
            self._turn.answer_tokens = answer_tokens

    async def enter(self, prompt_tokens: int, longest_answer_tokens: int) -> None:
        """Ask whoever sent it, then wait for its turn; once. Both numbers are of all its sequences together."""
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
        await turn.begin()
        self._turn = turn
        if request.on_turn is not None:
            request.on_turn()

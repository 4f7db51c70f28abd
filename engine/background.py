"""Keeps background requests out of the way of interactive ones: out of a model's queue, and from making it slow.

A running sequence makes every step of the engine longer, also for those who read along: beside interactive requests
only a few background ones run. Whose turn it is among those who wait is fair_queue.py's, by the number of sequences:
nothing has been rendered yet, so that tokens are not known.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from engine.fair_queue import Claim, FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.types import ChatRequest, TextRequest

# After the last interactive request the next one is still to be expected: agents ask again at once. Longer than that,
# and one person who asks now and then would halve a night's batches.
_QUIET_SECONDS = 0.25


class BackgroundSlots:
    """So many sequences of background work at once; more wait, and are let in fairly between owners.

    `size` of them while nobody else asks; `beside` of them as long as interactive requests run, and `quiet_seconds`
    longer. What runs already is not stopped.
    """

    def __init__(self, size: int, *, beside: int, quiet_seconds: float = _QUIET_SECONDS) -> None:
        self._size = size
        self._beside = beside
        self._quiet_seconds = quiet_seconds
        self._taken = 0
        self._interactive = 0
        self._admitting = False
        self._quiet: asyncio.TimerHandle | None = None
        self._queue = FairQueue()
        self._turns: dict[Claim, asyncio.Future[None]] = {}

    def resize(self, size: int, *, beside: int) -> None:
        """Let in so many from now on; what runs goes on."""
        self._size, self._beside = size, beside
        self._admit()

    def hold_back(self) -> None:
        """Hold background work back until `let_go`, once for each interactive request. Never waits."""
        self._interactive += 1
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def let_go(self) -> None:
        """Hold it back a little longer, if this was the last."""
        self._interactive -= 1
        if not self._interactive:
            self._quiet = asyncio.get_running_loop().call_later(self._quiet_seconds, self._be_quiet)

    async def take(self, request: ChatRequest | TextRequest, sequences: int) -> Callable[[], None]:
        """Wait for room for `sequences`, at most the whole size. Returns what gives it back."""
        claim = Claim(
            owner=request.owner,
            weight=request.queue_share,
            urgency=request.urgency,
            sequences=min(sequences, self._size),
            prompt_tokens=sequences,
            expected_answer_tokens=0,
            arrived_at=time.monotonic(),
        )
        await self._enter(claim)

        def give_back() -> None:
            self._taken -= claim.sequences
            self._admit()

        return give_back

    async def _enter(self, claim: Claim) -> None:
        self._queue.arrive(claim)
        if not self._queue and self._fits(claim):
            self._begin(claim)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[claim] = turn
        self._queue.push(claim)
        try:
            await turn
        except asyncio.CancelledError:
            if self._turns.pop(claim, None) is not None:
                self._queue.remove(claim)
            elif not turn.cancelled():  # its turn came in the same moment
                self._taken -= claim.sequences
            self._admit()
            raise

    def _begin(self, claim: Claim) -> None:
        self._taken += claim.sequences
        self._queue.charge(claim, 0)

    def _fits(self, claim: Claim) -> bool:
        """Alone anything fits: nothing waits for ever beside people who never stop."""
        held_back = self._interactive or self._quiet is not None
        return not self._taken or self._taken + claim.sequences <= (self._beside if held_back else self._size)

    def _be_quiet(self) -> None:
        self._quiet = None
        self._admit()

    def _admit(self) -> None:
        """Let one in, and the next when the event loop has looked at everybody else: a start costs milliseconds."""
        self._admitting = False
        claim = next(self._queue.in_turn(time.monotonic()), None)
        if claim is None or not self._fits(claim):
            return
        self._queue.remove(claim)
        turn = self._turns.pop(claim)
        if not turn.cancelled():  # else its client left just now
            self._begin(claim)
            turn.set_result(None)
        if not self._admitting:
            self._admitting = True
            asyncio.get_running_loop().call_soon(self._admit)

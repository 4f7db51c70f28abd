"""Lets requests into one model: as many as it can run, the fairest next, and some room always kept for newcomers.

vLLM has a queue and priorities of its own, but a running sequence is never pushed out by a waiting one there: what
must not wait has to find a free place. The order of those who wait is fair_queue.py's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from engine.admission.fair_queue import Claim, FairQueue
from engine.admission.in_flight import Headcount
from engine.errors import OverloadedError
from engine.stream import TokenStream
from engine.types import ChatRequest, TextRequest, Urgency

_LONGEST_RETRY_SECONDS = 120
# How much the newest answer counts in the running means.
_MEMORY = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """What a model can hold.

    `sequences`: generated at the same time. `kept_for_interactive` of them are never taken by batches, and
    `kept_for_newcomers` only by keys that have nothing running. `waiting`: interactive requests that may wait;
    batches bound themselves. `kv_tokens`: tokens of running conversations, None where not known.
    """

    sequences: int
    waiting: int
    kept_for_interactive: int = 0
    kept_for_newcomers: int = 0
    kv_tokens: int | None = None
    fair: bool = True


class _Standing(IntEnum):
    """For whom places are kept: for each from all below."""

    NEWCOMER = 0
    REGULAR = 1
    BATCH = 2


class Admission:
    """The door of one loaded model. Made and used in one event loop."""

    def __init__(self, room: Room, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._room = room
        self._clock = clock
        self._queue = FairQueue(fair=room.fair)
        self._turns: dict[Claim, asyncio.Future[None]] = {}
        self._running: dict[str, int] = {}  # sequences by owner
        self._sequences = 0
        self._kv_tokens = 0
        self._closed: Callable[[], Exception] | None = None
        self._visits = 0
        self._here = Headcount()  # visits
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._mean_answer_tokens = 256.0
        self._mean_seconds = 5.0

    @property
    def waiting(self) -> int:
        """How many wait, of any urgency."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many sequences run."""
        return self._sequences

    def ticket(self, request: ChatRequest | TextRequest, sequences: int, stream: TokenStream) -> Ticket:
        """Count a request in, until its `leave`. Raises `OverloadedError` where it could only be refused later."""
        self.arrive(request)
        return Ticket(self, request, sequences, stream)

    def arrive(self, request: ChatRequest | TextRequest) -> None:
        """Count a request as being here, waiting or running, until `depart`.

        Raises `OverloadedError`, before any work is done for it, where it could only be refused later.
        """
        most = self._room.sequences + self._room.waiting
        if request.urgency == Urgency.INTERACTIVE and self._here.has_share(request.owner, most):
            raise self._overloaded()
        self._here.add(request.owner)
        self.begin_work()

    def depart(self, request: ChatRequest | TextRequest) -> None:
        """Say that it has ended."""
        self._here.remove(request.owner)
        self.end_work()

    def begin_work(self) -> None:
        """Count something as going on here, which `idle` waits for, until `end_work`."""
        self._visits += 1
        self._nobody.clear()

    def end_work(self) -> None:
        """Count one less."""
        self._visits -= 1
        if not self._visits:
            self._nobody.set()

    async def idle(self) -> None:
        """Return when nobody is here any more."""
        await self._nobody.wait()

    def close(self, reason: Callable[[], Exception]) -> None:
        """Send everybody away who waits, and whoever comes: nothing runs here any more."""
        self._closed = reason
        turns, self._turns = self._turns, {}
        for claim, turn in turns.items():
            self._queue.remove(claim)
            if not turn.cancelled():
                turn.set_exception(reason())

    def enter(  # noqa: PLR0913  # what decides about a turn
        self,
        owner: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        sequences: int = 1,
        weight: float = 1.0,
        urgency: Urgency = Urgency.INTERACTIVE,
    ) -> Turn:
        """Wait for a turn and hold the room until the block is left (`async with`). Cancelling gives up the place.

        Raises `OverloadedError` at once when too many wait, or later when a newcomer takes the place in the queue
        of somebody who has many.
        """
        room = min(sequences, self._room.sequences)
        claim = Claim(
            owner=owner,
            weight=weight,
            urgency=urgency,
            sequences=room,
            prompt_tokens=prompt_tokens,
            expected_answer_tokens=room * min(float(max_tokens), self._mean_answer_tokens),
            arrived_at=self._clock(),
        )
        return Turn(self, claim)

    async def take_turn(self, claim: Claim) -> float:
        """Wait for the claim's turn; its room is kept until `end_turn`. Returns when that was. Raises like `enter`."""
        if self._closed is not None:
            raise self._closed()
        self._queue.arrive(claim)
        if self._queue or not self._fits(claim):
            await self._wait(claim)
        else:
            self._take(claim)
        return self._clock()

    def end_turn(self, claim: Claim, answer_tokens: int, since: float | None) -> None:
        """Give its room back, taken at `since`; None: it was cut off, and says nothing of how long answers take."""
        if since is None:
            # Of an answer that was not streamed nobody knows how long it was when its client left: the guess stays.
            self._leave(claim, answer_tokens or claim.expected_answer_tokens, 0.0)
        else:
            self._leave(claim, answer_tokens, self._clock() - since)

    async def _wait(self, claim: Claim) -> None:
        if not self._fits(claim):
            self._make_room_to_wait(claim)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[claim] = turn
        self._queue.push(claim)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if claim in self._turns:
                del self._turns[claim]
                self._queue.remove(claim)
                self._admit()
            elif not turn.cancelled() and turn.exception() is None:  # its turn came at this very moment
                self._leave(claim, 0, 0.0)
            raise

    def _make_room_to_wait(self, claim: Claim) -> None:
        """Refuse the newcomer, or the last in the longest line if that is not the newcomer's own."""
        if claim.urgency != Urgency.INTERACTIVE or self._queue.count(Urgency.INTERACTIVE) < self._room.waiting:
            return
        last = self._queue.newest_of_the_longest(Urgency.INTERACTIVE)
        mine = self._queue.waiting_of(claim.owner, Urgency.INTERACTIVE)
        if last is None or self._queue.waiting_of(last.owner, Urgency.INTERACTIVE) <= mine + 1 or not self._room.fair:
            raise self._overloaded()
        self._queue.remove(last)
        turn = self._turns.pop(last)
        if not turn.cancelled():
            turn.set_exception(self._overloaded())

    def _overloaded(self) -> OverloadedError:
        ahead = max(self._queue.count(Urgency.INTERACTIVE), self._here.total - self._room.sequences) + 1
        seconds = math.ceil(ahead * self._mean_seconds / self._room.sequences)
        return OverloadedError(
            "The queue of this model is full. Try again in a few seconds, or send fewer requests at the same time.",
            retry_after_seconds=min(max(seconds, 1), _LONGEST_RETRY_SECONDS),
        )

    def _admit(self) -> None:
        """Let in whoever fits, in turn.

        One who does not fit holds up those behind it, so that large requests are not passed for ever: only those go
        past it for whom more places are kept.
        """
        while self._queue:
            claim = self._next()
            if claim is None:
                return
            self._queue.remove(claim)
            turn = self._turns.pop(claim)
            if not turn.cancelled():  # else its client left just now
                self._take(claim)
                turn.set_result(None)

    def _next(self) -> Claim | None:
        held_up = _Standing.BATCH + 1
        for claim in self._queue.in_turn(self._clock()):
            standing = self._standing(claim)
            if standing >= held_up:
                continue
            if self._fits(claim):
                return claim
            held_up = max(standing, _Standing.REGULAR)  # no newcomer is held up by another
        return None

    def _fits(self, claim: Claim) -> bool:
        if self._sequences == 0:  # alone, whatever the size: nothing is refused for good
            return True
        standing, kept = self._standing(claim), 0
        if standing >= _Standing.REGULAR:
            kept = self._room.kept_for_newcomers
        if standing == _Standing.BATCH:
            kept = max(kept, self._room.kept_for_interactive)
        return not self._lacks_tokens(claim) and claim.sequences <= self._room.sequences - self._sequences - kept

    def _standing(self, claim: Claim) -> _Standing:
        if self._is_newcomer(claim):
            return _Standing.NEWCOMER
        interactive = claim.urgency_at(self._clock()) == Urgency.INTERACTIVE
        return _Standing.REGULAR if interactive else _Standing.BATCH

    def _lacks_tokens(self, claim: Claim) -> bool:
        """Whether there is no room for its tokens.

        A newcomer's are not counted: where they are too many, vLLM pauses the youngest conversation.
        """
        most = self._room.kv_tokens
        return most is not None and not self._is_newcomer(claim) and self._kv_tokens + _kv_tokens(claim) > most

    def _is_newcomer(self, claim: Claim) -> bool:
        return claim.urgency == Urgency.INTERACTIVE and claim.owner not in self._running

    def _take(self, claim: Claim) -> None:
        self._sequences += claim.sequences
        self._kv_tokens += _kv_tokens(claim)
        self._running[claim.owner] = self._running.get(claim.owner, 0) + claim.sequences
        self._queue.charge(claim, claim.expected_answer_tokens)

    def _leave(self, claim: Claim, answer_tokens: float, seconds: float) -> None:
        self._queue.charge(claim, answer_tokens)
        self._sequences -= claim.sequences
        self._kv_tokens -= _kv_tokens(claim)
        self._running[claim.owner] -= claim.sequences
        if not self._running[claim.owner]:
            del self._running[claim.owner]
        if answer_tokens and seconds:
            self._mean_answer_tokens += _MEMORY * (answer_tokens / claim.sequences - self._mean_answer_tokens)
            self._mean_seconds += _MEMORY * (seconds - self._mean_seconds)
        self._admit()


def _kv_tokens(claim: Claim) -> int:
    return claim.prompt_tokens + math.ceil(claim.expected_answer_tokens)


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


class Ticket:
    """One chat request at the admission, from its arrival to its end; it enters when its size is known."""

    __slots__ = ("_admission", "_request", "_sequences", "_stream", "_turn")

    def __init__(
        self, admission: Admission, request: ChatRequest | TextRequest, sequences: int, stream: TokenStream
    ) -> None:
        self._admission = admission
        self._request = request
        self._sequences = sequences
        self._stream = stream
        self._turn: Turn | None = None  # from when on it has entered

    async def enter(self, prompt_tokens: int, longest_answer_tokens: int) -> None:
        """Have its sender's limits charged, then wait for its turn; once. Both are of all its sequences together."""
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
        self._stream.dispatched()

    def leave(self, error: BaseException | None) -> None:
        """It has ended, whether it entered or not; `error` if it was cut off."""
        try:
            if self._turn is not None:
                self._turn.answer_tokens = self._stream.completion_tokens
                self._turn.end(cut_off=error is not None)
        finally:
            self._admission.depart(self._request)


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

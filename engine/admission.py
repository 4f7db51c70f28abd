"""Admits requests to one model: as many as it can run, in a fair order, with some places always kept for newcomers.

vLLM has a queue and priorities of its own, but never preempts a running sequence for a waiting one: an urgent request
must find a free place. `FairQueue` orders the waiting requests.
The length of an answer is known only at its end. When running answers outgrow the KV cache, vLLM preempts the sequence
with the largest `Ticket.priority`: the youngest of the owner with the most. Our plugin also has vLLM preempt one for a
newcomer that got no block.
Interactive requests pass one admission, that of the loaded model. Batch and background requests pass another one first,
before they are rendered and have a lease. It counts sequences only, and lives as long as the model is configured.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Self

from engine.errors import NotStartedError, OverloadedError, engine_died
from engine.stream import TokenStream
from engine.types import GenerationRequest, Request, Urgency

_LONGEST_RETRY_SECONDS = 120
# How much the newest answer counts in the running means.
_MEMORY = 0.05
# The least expected length of an answer (unless asked to be shorter): after many short ones not too many long ones
# are let in at once.
_FEWEST_EXPECTED_TOKENS = 256.0
# Beyond this share of the KV cache in use, only owners with less than an equal share of it are let in.
_FULL = 0.9
_GROWTH_READ_SECONDS = 0.05  # adding up hundreds of running answers takes 0.1 ms
_PRIORITY_BITS = 40  # below the urgency
# Interactive requests are below the first, batches below the second.
BATCH_PRIORITY = Urgency.BATCH << _PRIORITY_BITS
BACKGROUND_PRIORITY = Urgency.BACKGROUND << _PRIORITY_BITS
SEQUENCE = 1 << 24  # in priorities: one sequence of the same owner; the bits below are its size in tokens
# After an interactive request another one is likely: an agent's at once, a person's after some reading. Background
# requests, which have until tomorrow, wait for both.
BACKGROUND_QUIET_SECONDS = 5.0
# What a token of an answer costs compared to one of the prompt, as in the paper that `FairQueue` follows.
ANSWER_TOKEN_COST = 2.0
# A batch that has waited for so long counts as interactive, so that endless interactive requests do not starve it; a
# background request counts as a batch, and never as more.
PATIENCE_SECONDS = 60.0
_MOST_IDLE_OWNERS = 1024


def beside_interactive(sequences: int) -> int:
    """Return how many places batch and background requests may have beside interactive ones: 1/32."""
    return max(1, sequences // 32)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers of a model with one cache layout: a sequence takes a block for each `block_tokens` of its tokens.

    `most_blocks` limits these blocks of a sequence; None: no limit. Every sequence takes `more_blocks` in addition.
    """

    block_tokens: int
    most_blocks: int | None = None
    more_blocks: int = 0

    def blocks_of(self, tokens: int) -> int:
        blocks = -(-tokens // self.block_tokens)
        return self.more_blocks + (blocks if self.most_blocks is None else min(blocks, self.most_blocks))


@dataclass(frozen=True, slots=True)
class Room:
    """How much may run in a model at the same time.

    `sequences` run at the same time. Batches never take the last `kept_for_interactive` of these places; only keys
    with nothing running take the last `kept_for_newcomers`. `waiting`: interactive requests that may wait; batches
    bound themselves. `kv_room`: the size of the KV cache, in blocks if there are `kv_groups` (all take from the same
    blocks), else in tokens; None if unknown.
    `beside_interactive`, only of an admission before rendering: how many sequences run while interactive requests run
    in the model and shortly after, because each sequence makes every step longer. At other times background requests
    leave as many places free.
    """

    sequences: int
    waiting: int
    kept_for_interactive: int = 0
    kept_for_newcomers: int = 0
    kv_room: int | None = None
    kv_groups: tuple[KvGroup, ...] = ()
    fair: bool = True
    beside_interactive: int | None = None
    quiet_seconds: float = 0.25  # as BACKGROUND_QUIET_SECONDS, for a batch, whose client waits too
    background_quiet_seconds: float = BACKGROUND_QUIET_SECONDS

    def taken(self, tokens: int, sequences: int) -> int:
        """Return what `sequences` with `tokens` in total take of `kv_room`."""
        if not self.kv_groups:
            return tokens
        each = -(-tokens // sequences)
        return sequences * sum(group.blocks_of(each) for group in self.kv_groups)


@dataclass(slots=True, eq=False)
class Claim:
    """A request that waits or runs. `cost` is charged to its owner's counter; times are monotonic seconds."""

    owner: str
    weight: float
    urgency: Urgency
    sequences: int
    prompt_tokens: int
    expected_answer_tokens: float  # of all sequences together, like the next one
    longest_answer_tokens: int
    arrived_at: float
    cost: float = 0.0

    def urgency_at(self, now: float) -> Urgency:
        if now - self.arrived_at < PATIENCE_SECONDS:
            return self.urgency
        return Urgency.BATCH if self.urgency == Urgency.BACKGROUND else Urgency.INTERACTIVE


@dataclass(slots=True)
class FairQueue:
    """All waiting claims of one model, and a counter per owner: the owner with the smallest counter is next.

    The algorithm is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
    arXiv 2401.00588), with its counter lift: a key that comes back after a pause starts at the smallest counter of
    those who wait, so that it is neither punished nor has saved anything up. Changed here: an answer is charged by its
    expected length when it begins and corrected when it ends, while the paper charges every decoding step; counters are
    divided by the weight of the key's tier; and urgency goes before the counters. Pure data: no clock, no event loop.

    `fair=False` makes it first come, first served (within an urgency), as in most servers, for comparison.
    """

    fair: bool = True
    _waiting: dict[tuple[Urgency, str], deque[Claim]] = field(default_factory=dict)
    _counters: dict[str, float] = field(default_factory=dict)
    _last_served: str | None = None

    def __len__(self) -> int:
        return sum(len(claims) for claims in self._waiting.values())

    def count(self, urgency: Urgency) -> int:
        return sum(len(claims) for (kind, _), claims in self._waiting.items() if kind == urgency)

    def arrive(self, claim: Claim) -> None:
        """Lift the owner's counter if none of their claims waits. Call before `push` or `charge`."""
        if claim.owner not in self._owners():
            self._counters[claim.owner] = max(self._counters.get(claim.owner, 0.0), self._floor())

    def push(self, claim: Claim) -> None:
        self._waiting.setdefault((claim.urgency, claim.owner), deque()).append(claim)

    def remove(self, claim: Claim) -> None:
        claims = self._waiting[claim.urgency, claim.owner]
        claims.remove(claim)
        if not claims:
            del self._waiting[claim.urgency, claim.owner]

    def in_turn(self, now: float) -> Iterator[Claim]:
        """Yield the first claim of every owner, in the order of service."""
        heads = (claims[0] for claims in self._waiting.values())
        yield from sorted(heads, key=lambda claim: self._rank(claim, now))

    def charge(self, claim: Claim, answer_tokens: float) -> None:
        """Charge the owner's counter for a claim: an estimate when it begins, replaced by the real cost at its end."""
        cost = (claim.prompt_tokens + ANSWER_TOKEN_COST * answer_tokens) / claim.weight
        self._counters[claim.owner] = self._counters.get(claim.owner, 0.0) + cost - claim.cost
        claim.cost = cost
        self._last_served = claim.owner
        if len(self._counters) > _MOST_IDLE_OWNERS:
            # An owner who is at or below the floor would be lifted to it on arrival: forgetting them changes nothing
            floor, kept = self._floor(), {*self._owners(), self._last_served}
            self._counters = {name: count for name, count in self._counters.items() if count > floor or name in kept}

    def to_refuse(self, urgency: Urgency, owner: str) -> Claim | None:
        """Return the newest claim of the owner with the most waiting; None if a new claim of `owner` would be that."""
        queues = {who: claims for (kind, who), claims in self._waiting.items() if kind == urgency}
        longest = max(queues.values(), key=len, default=deque[Claim]())
        return longest[-1] if self.fair and len(longest) > len(queues.get(owner, ())) + 1 else None

    def _rank(self, claim: Claim, now: float) -> tuple[int, float, bool, float]:
        if not self.fair:
            return claim.urgency_at(now), 0.0, False, claim.arrived_at
        # A newcomer is lifted to the smallest counter, often a busy owner's: on a tie the owner served last goes last.
        just_served = claim.owner == self._last_served
        return claim.urgency_at(now), self._counters[claim.owner], just_served, claim.arrived_at

    def _owners(self) -> set[str]:
        return {owner for _, owner in self._waiting}

    def _floor(self) -> float:
        last = 0.0 if self._last_served is None else self._counters.get(self._last_served, 0.0)
        return min((self._counters[owner] for owner in self._owners()), default=last)


class InFlight(Counter[str | None]):
    """How many requests each owner has in flight. All unknown owners together count as one, None."""

    def has_share(self, owner: str | None, most: int) -> bool:
        """Whether `most` requests are in flight, and the owner has an equal share of these or more."""
        return self.total() >= most and self[owner] * len(self) >= most

    def add(self, owner: str | None) -> None:
        self[owner] += 1

    def remove(self, owner: str | None) -> None:
        self[owner] -= 1
        if not self[owner]:
            del self[owner]


class _Standing(IntEnum):
    """Which reserved places a claim may take: each class may take more than the next."""

    NEWCOMER = 0
    REGULAR = 1
    BATCH = 2
    BACKGROUND = 3


class Admission:
    """The bounded, fair queue of one model and what runs in it. Made and used in one event loop."""

    def __init__(self, room: Room, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._room = room
        self._clock = clock
        self._queue = FairQueue(fair=room.fair)
        self._waiting: dict[Claim, asyncio.Future[None]] = {}
        self.running = 0  # sequences
        self._by_owner: Counter[str] = Counter()  # of them
        self._kv_taken: Counter[str] = Counter()  # by owner, as expected when they were let in
        self._growing: dict[Claim, Callable[[], int]] = {}  # running claims, with the tokens of their answers so far
        self._growth: tuple[int, Counter[str]] = 0, Counter()
        self._growth_read_at = -math.inf
        self._closed = False
        self._in_flight = InFlight()  # waiting, being rendered, or running
        self._work = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._interactive = 0
        self._unquiet: dict[Urgency, asyncio.TimerHandle] = {}  # urgencies held back by an interactive request just now
        self._paused = False
        self._mean_answer_tokens = _FEWEST_EXPECTED_TOKENS
        self._mean_seconds = 5.0  # of a place, for each request

    @property
    def waiting(self) -> int:
        """Requests of any urgency."""
        return len(self._queue)

    def resize(self, room: Room) -> None:
        """Apply new limits from now on; running requests continue."""
        self._room = room
        self._dispatch()

    def arrive(self, request: Request) -> None:
        """Count a request as in flight, waiting or running, until `depart`.

        Raises `OverloadedError` if the queue would refuse it later anyway, before any work is done for it.
        """
        most = self._room.sequences + self._room.waiting
        if request.urgency == Urgency.INTERACTIVE and self._in_flight.has_share(request.owner, most):
            raise self._overloaded()
        self._in_flight.add(request.owner)
        self.begin_work()

    def depart(self, request: Request) -> None:
        self._in_flight.remove(request.owner)
        self.end_work()

    def begin_work(self) -> None:
        """Count something that `idle` waits for, until `end_work`."""
        self._work += 1
        self._idle.clear()

    def end_work(self) -> None:
        self._work -= 1
        if not self._work:
            self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()

    def begin_interactive(self) -> None:
        """Let only `beside_interactive` sequences run until `end_interactive`. Called once for each request."""
        self._interactive += 1
        while self._unquiet:
            self._unquiet.popitem()[1].cancel()

    def end_interactive(self) -> None:
        """After the last one, keep that limit for `quiet_seconds` or `background_quiet_seconds`."""
        self._interactive -= 1
        if not self._interactive:
            later, room = asyncio.get_running_loop().call_later, self._room
            self._unquiet = {
                Urgency.BATCH: later(room.quiet_seconds, self._be_quiet, Urgency.BATCH),
                Urgency.BACKGROUND: later(room.background_quiet_seconds, self._be_quiet, Urgency.BACKGROUND),
            }

    def close(self) -> None:
        """Refuse all requests that wait or come later: the engine has died."""
        self._closed = True
        for claim in list(self._waiting):
            self._refuse(claim, engine_died(NotStartedError))

    def enter(  # noqa: PLR0913  # what decides its place in the queue
        self,
        owner: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        sequences: int = 1,
        weight: float = 1.0,
        urgency: Urgency = Urgency.INTERACTIVE,
        made: Callable[[], int] | None = None,
    ) -> Ticket:
        """Return a ticket; `async with` waits until it is dispatched and keeps its room until the block ends.

        `made` returns how many tokens the answers have so far. The wait may be cancelled. It raises `OverloadedError`
        at once if the queue is full, or later if a request of an owner with fewer takes its place in the queue.
        """
        room = min(sequences, self._room.sequences)
        expected = room * min(float(max_tokens), max(self._mean_answer_tokens, _FEWEST_EXPECTED_TOKENS))
        claim = (owner, weight, urgency, room, prompt_tokens, expected, room * max_tokens, self._clock())
        return Ticket(*claim, admission=self, made=made)

    async def begin(self, ticket: Ticket) -> None:
        """Wait until it is dispatched. Its room is kept until `end`. Raises like `enter`."""
        if self._closed:
            raise engine_died(NotStartedError)
        self._queue.arrive(ticket)
        if self._queue or not self._fits(ticket):
            await self._wait(ticket)
        else:
            self._take(ticket)
        if ticket.made is not None:
            self._growing[ticket] = ticket.made
        ticket.begun_at = self._clock()
        ticket.priority = int(ticket.urgency) << _PRIORITY_BITS
        if self._room.fair:  # else vLLM preempts the youngest
            ticket.priority += round((self._by_owner[ticket.owner] - ticket.sequences) * SEQUENCE / ticket.weight)
            ticket.priority += min(_expected_tokens(ticket) // ticket.sequences, SEQUENCE - 1)

    def end(self, ticket: Ticket, *, cut_off: bool) -> None:
        """Give its room back. A request that was `cut_off` does not count for the mean length of answers."""
        if cut_off:
            # The length of an answer that was not streamed is unknown when its client leaves: the estimate stays.
            self._leave(ticket, ticket.answer_tokens or ticket.expected_answer_tokens, 0.0)
        else:
            self._leave(ticket, ticket.answer_tokens, self._clock() - ticket.begun_at)

    async def _wait(self, claim: Claim) -> None:
        if not self._fits(claim):
            self._refuse_one(claim)
        dispatched: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[claim] = dispatched
        self._queue.push(claim)
        self._dispatch()
        try:
            await dispatched
        except asyncio.CancelledError:
            if claim in self._waiting:
                del self._waiting[claim]
                self._queue.remove(claim)
                self._dispatch()
            elif not dispatched.cancelled() and dispatched.exception() is None:  # dispatched at the same moment
                self._leave(claim, 0, 0.0)
            raise

    def _refuse_one(self, claim: Claim) -> None:
        """If the queue is full, refuse the newest claim of the owner with the most; that may be this claim."""
        if claim.urgency != Urgency.INTERACTIVE or self._queue.count(Urgency.INTERACTIVE) < self._room.waiting:
            return
        last = self._queue.to_refuse(Urgency.INTERACTIVE, claim.owner)
        if last is None:
            raise self._overloaded()
        self._refuse(last, self._overloaded())

    def _refuse(self, claim: Claim, error: Exception) -> None:
        self._queue.remove(claim)
        dispatched = self._waiting.pop(claim)
        if not dispatched.cancelled():
            dispatched.set_exception(error)

    def _overloaded(self) -> OverloadedError:
        ahead = max(self._queue.count(Urgency.INTERACTIVE), self._in_flight.total() - self._room.sequences) + 1
        seconds = math.ceil(ahead * self._mean_seconds / self._room.sequences)
        return OverloadedError(
            "The queue of this model is full. Try again in a few seconds, or send fewer requests at the same time.",
            retry_after_seconds=min(seconds, _LONGEST_RETRY_SECONDS),
            limit="max_queued_requests",
        )

    def _dispatch(self) -> None:
        """Dispatch what fits, in order.

        A claim that does not fit holds up those behind it, so that a large one is not passed for ever. Two kinds pass:
        claims with more reserved places and, if only the KV cache is full, those of owners below an equal share of it.
        """
        while self._queue and not self._paused:
            claim = self._next()
            if claim is None:
                return
            self._queue.remove(claim)
            dispatched = self._waiting.pop(claim)
            if not dispatched.cancelled():  # else its client left just now
                self._take(claim)
                dispatched.set_result(None)
                if self._room.beside_interactive is not None:  # one at a time: checking and rendering take milliseconds
                    self._paused = True
                    asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        self._dispatch()

    def _be_quiet(self, urgency: Urgency) -> None:
        del self._unquiet[urgency]
        self._dispatch()

    def _next(self) -> Claim | None:
        held_up, is_short = _Standing.BACKGROUND + 1, False
        for claim in self._queue.in_turn(self._clock()):
            standing = self._standing(claim)
            if standing >= held_up or (is_short and self._exceeds_share(claim)):
                continue
            if self._fits(claim):
                return claim
            if self._has_place(claim):  # its owner has too much of the KV cache: no reason to hold up others
                held_up, is_short = min(held_up, standing + 1), True
            else:
                held_up = max(standing, _Standing.REGULAR)  # newcomers do not hold up each other
        return None

    def _fits(self, claim: Claim) -> bool:
        if self.running == 0:  # alone, whatever its size: no claim waits forever
            return True
        return self._has_place(claim) and not self._lacks_tokens(claim)

    def _has_place(self, claim: Claim) -> bool:
        room, standing, most = self._room, self._standing(claim), self._room.sequences
        if room.beside_interactive is not None:
            if self._interactive or claim.urgency in self._unquiet:
                most = room.beside_interactive
            elif standing == _Standing.BACKGROUND:  # lines of a file run for minutes: a batch's client would wait
                most -= room.beside_interactive
        kept = 0 if standing == _Standing.NEWCOMER else room.kept_for_newcomers
        if standing >= _Standing.BATCH:
            kept = max(kept, room.kept_for_interactive)
        return claim.sequences <= most - self.running - kept

    def _lacks_tokens(self, claim: Claim) -> bool:
        """Whether the KV cache is too full for a claim, and its owner would have more than an equal share of it."""
        most = self._room.kv_room
        if most is None or not self._exceeds_share(claim):
            return False
        used, beyond_expected = self._read_growth()
        expected = self._kv_taken.total() + beyond_expected.total() + self._expected(claim)
        return expected > most or used + self._room.taken(claim.prompt_tokens, claim.sequences) > _FULL * most

    def _exceeds_share(self, claim: Claim) -> bool:
        """Whether its owner would have more than an equal share of the KV cache. Never of newcomers, always of batches.

        An owner with less is dispatched even into a full cache: vLLM preempts those with more.
        """
        standing = self._standing(claim)
        if self._room.kv_room is None or standing != _Standing.REGULAR:
            return standing >= _Standing.BATCH
        of_owner = self._kv_taken[claim.owner] + self._read_growth()[1][claim.owner] + self._expected(claim)
        return of_owner > _FULL * self._room.kv_room / len(self._by_owner.keys() | {claim.owner})

    def _read_growth(self) -> tuple[int, Counter[str]]:
        """Return how much of the KV cache is in use, and by owner how much more than estimated the answers will take.

        An answer that has outgrown its estimate is expected to become twice as long as it is.
        """
        now = self._clock()
        if now - self._growth_read_at >= _GROWTH_READ_SECONDS:
            used, beyond = 0, Counter[str]()
            for claim, made in self._growing.items():
                tokens = made()
                used += self._room.taken(claim.prompt_tokens + tokens, claim.sequences)
                becoming = min(2 * tokens, claim.longest_answer_tokens)
                if becoming > claim.expected_answer_tokens:
                    longer = self._room.taken(claim.prompt_tokens + becoming, claim.sequences)
                    beyond[claim.owner] += longer - self._expected(claim)
            self._growth, self._growth_read_at = (used, beyond), now
        return self._growth

    def _expected(self, claim: Claim) -> int:
        return self._room.taken(_expected_tokens(claim), claim.sequences)

    def _standing(self, claim: Claim) -> _Standing:
        if claim.urgency == Urgency.INTERACTIVE and claim.owner not in self._by_owner:
            return _Standing.NEWCOMER
        if claim.urgency == Urgency.BACKGROUND:
            return _Standing.BACKGROUND
        interactive = claim.urgency_at(self._clock()) == Urgency.INTERACTIVE
        return _Standing.REGULAR if interactive else _Standing.BATCH

    def _take(self, claim: Claim) -> None:
        self.running += claim.sequences
        self._kv_taken[claim.owner] += self._expected(claim)
        self._by_owner[claim.owner] += claim.sequences
        self._queue.charge(claim, claim.expected_answer_tokens)

    def _leave(self, claim: Claim, answer_tokens: float, seconds: float) -> None:
        self._queue.charge(claim, answer_tokens)
        self._growing.pop(claim, None)
        if self._waiting:  # see now what becomes free: nothing else may end for minutes
            self._growth_read_at = -math.inf
        self.running -= claim.sequences
        self._kv_taken[claim.owner] -= self._expected(claim)
        self._by_owner[claim.owner] -= claim.sequences
        if not self._by_owner[claim.owner]:
            del self._by_owner[claim.owner], self._kv_taken[claim.owner]
        if answer_tokens and seconds:
            self._mean_answer_tokens += _MEMORY * (answer_tokens / claim.sequences - self._mean_answer_tokens)
            self._mean_seconds += _MEMORY * (seconds * claim.sequences - self._mean_seconds)
        self._dispatch()


def _expected_tokens(claim: Claim) -> int:
    return claim.prompt_tokens + math.ceil(claim.expected_answer_tokens)


@dataclass(slots=True, eq=False)
class Ticket(Claim):
    """`async with`: waits until the claim is dispatched, and keeps its room until the block ends.

    Set `answer_tokens` to the tokens of the answer before leaving. Once dispatched, `priority` says how early vLLM
    should preempt its first sequence (each further one's is `SEQUENCE` larger): by urgency, then by how many sequences
    its owner has, then by size.
    """

    admission: Admission = field(kw_only=True)
    made: Callable[[], int] | None = field(kw_only=True)
    answer_tokens: int = 0
    begun_at: float = 0.0
    priority: int = 0

    async def __aenter__(self) -> Self:
        await self.admission.begin(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.admission.end(self, cut_off=kind is not None)


class ChatTicket:
    """One chat request at the admission (`with`), from its arrival to the end of its stream.

    It enters when its size is known. Raises like `Admission.arrive`.
    """

    def __init__(self, admission: Admission, request: GenerationRequest, sequences: int, stream: TokenStream) -> None:
        self._admission, self._request, self._sequences, self._stream = admission, request, sequences, stream
        self._ticket: Ticket | None = None  # once it has been dispatched

    def __enter__(self) -> Self:
        self._admission.arrive(self._request)
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._stream.on_end(self._leave)
        else:
            self._leave(error)

    async def enter(self, prompt_tokens: int, longest_answer_tokens: int) -> int:
        """Charge the sender's limits, then wait until it is dispatched. Call once; tokens are of all sequences.

        Returns the priority of its first sequence in vLLM; each further one's is `SEQUENCE` larger.
        """
        request = self._request
        if request.before_turn is not None:
            await request.before_turn(prompt_tokens, longest_answer_tokens)
        ticket = self._admission.enter(
            request.owner,
            prompt_tokens=prompt_tokens,
            max_tokens=longest_answer_tokens // self._sequences,
            sequences=self._sequences,
            weight=request.queue_share,
            urgency=request.urgency,
            made=partial(getattr, self._stream, "completion_tokens"),
        )
        await self._admission.begin(ticket)
        self._ticket = ticket
        self._stream.dispatched()
        return ticket.priority

    def _leave(self, error: BaseException | None) -> None:
        try:
            if self._ticket is not None:
                self._ticket.answer_tokens = self._stream.completion_tokens
                self._admission.end(self._ticket, cut_off=error is not None)
        finally:
            self._admission.depart(self._request)

"""Lets models that do not all fit into memory take turns: requests wait here for one that is not loaded.

Whose turn it is, is eviction.py's; loading and ending models is the pool's, which asks here when it may.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from engine.errors import ModelLoadingError, OverloadedError
from engine.pool.eviction import Decision, Residency
from engine.pool.memory import Holdings

# Longer than a busy model may keep another one waiting, and a large one takes to load.
_LONGEST_WAIT_SECONDS = 600.0
_MOST_WAITING = 512  # requests for one model; the queue of a loaded model has the same length by default


@dataclass(slots=True)
class _Seat:
    """One model: what it is told, and who uses it or waits for it."""

    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    must_leave: asyncio.Event = field(default_factory=asyncio.Event)
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    waiting: int = 0


class Sharing:
    """The models that take turns. One per pool; all methods belong to the event loop."""

    def __init__(self, residency: Residency, clock: Callable[[], float], holdings: Holdings | None = None) -> None:
        self._clock = clock
        self._holdings = holdings or Holdings()
        self._news = asyncio.Event()
        self._moved = asyncio.Event()
        self._every: dict[str, _Seat] = {}  # kept when a reload changes who shares: tasks and requests hold them
        self._residency = residency
        self._seats = {name: self._seat(name) for name in residency.rooms}
        self._carry_out(residency.fill())

    def update(self, residency: Residency, loaded: Collection[str]) -> None:
        """From now on these take turns. `loaded` are the models that are loaded or being so."""
        residency.follow(self._residency, loaded, self._clock())
        for name in self._seats.keys() - residency.rooms.keys():
            self._seats[name].may_load.set()  # it has all the room that it needs
            self._seats[name].must_leave.clear()
        for name in residency.rooms.keys() - self._seats.keys():
            seat = self._seat(name)
            (seat.may_load.set if name in loaded else seat.may_load.clear)()
            for _ in range(seat.users):
                residency.began(name)
        self._seats = {name: self._seat(name) for name in residency.rooms}
        self._residency = residency
        self.woken()
        self._tell()

    @property
    def swaps(self) -> int:
        """How often one has made room for another."""
        return self._residency.swaps

    async def direct(self) -> None:
        """Decide, whenever something has happened, until cancelled."""
        while True:
            self._news.clear()
            decision = self._residency.decide(self._clock())
            self._carry_out(decision)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(decision.again_seconds):
                    await self._news.wait()

    def waiting(self, name: str) -> int:
        """Return how many requests wait until it is loaded."""
        return self._seats[name].waiting if name in self._seats else 0

    def shares(self, name: str) -> bool:
        """Whether it takes turns with others, and is waited for by whoever uses it."""
        return name in self._seats

    def has_room(self, name: str) -> bool:
        """Whether it may load, or stay loaded, now."""
        seat = self._seats.get(name)
        return seat is None or (seat.may_load.is_set() and not seat.must_leave.is_set())

    async def turn_to_load(self, name: str) -> None:
        """Return when there is room for it, which is then its own until `left`.

        At once for one that does not share, but for memory that others still hold who are about to leave.
        """
        if name in self._seats:
            await self._seats[name].may_load.wait()
        await self._holdings.room_for(name)

    def going(self, names: Iterable[str]) -> None:
        """Say that these end with their last answer, to be loaded anew or not at all."""
        self._holdings.going(names)

    def loaded(self, name: str) -> None:
        """Say that it answers now."""
        if name in self._seats:
            self._residency.is_in(name, self._clock())
            self._tell()

    async def turn_to_leave(self, name: str) -> None:
        """Return when it is to make room; from then on new requests wait until it is back."""
        await self._seat(name).must_leave.wait()  # one that does not share never has to

    async def unused(self, name: str) -> None:
        """Return when no request uses it."""
        seat = self._seat(name)
        if seat.users:
            seat.unused.clear()
            await seat.unused.wait()

    def left(self, name: str, *, asleep: bool = False) -> None:
        """Say that its memory is free again."""
        self._holdings.left(name, asleep=asleep)
        if name in self._seats:
            self._seats[name].may_load.clear()
            self._seats[name].must_leave.clear()
            self._residency.is_out(name)
            self._tell()

    async def hold(self, name: str, usable: Callable[[], bool]) -> None:
        """Hold a model for a request until `release`, after waiting until it is loaded. So long it does not leave.

        `usable` says whether it is loaded, and raises `EngineError` when waiting is in vain. Raises
        `ModelLoadingError` after ten minutes and `OverloadedError` when too many wait.
        """
        seat = self._seat(name)
        if name in self._seats and not (self._stays(name) and usable()):
            await self._wait(name, seat, usable)
        seat.users += 1
        if name in self._seats:
            self._residency.began(name)

    def release(self, name: str) -> None:
        """Say that a request which held it has ended."""
        seat = self._seat(name)
        seat.users -= 1
        if not seat.users:
            seat.unused.set()
        if name in self._seats:
            self._residency.ended(name, self._clock())
            if not seat.users:
                self._tell()

    async def _wait(self, name: str, seat: _Seat, usable: Callable[[], bool]) -> None:
        if seat.waiting >= _MOST_WAITING:
            raise OverloadedError(
                "This model shares memory with others, and too many requests wait for its turn. Try again later.",
                retry_after_seconds=30,
            )
        seat.waiting += 1
        try:
            async with asyncio.timeout(_LONGEST_WAIT_SECONDS):
                while not (usable() and self._stays(name)):
                    if name in self._seats:
                        self._residency.asked(name, self._clock())
                        self._tell()
                    moved = self._moved
                    await moved.wait()
        except TimeoutError:
            raise ModelLoadingError(
                "This model shares memory with others, and its turn has not come for ten minutes. Try again later.",
                retry_after_seconds=60,
            ) from None
        finally:
            seat.waiting -= 1
            if not seat.waiting and name in self._seats:
                self._residency.nobody_asks(name)

    def _stays(self, name: str) -> bool:
        return name not in self._seats or not self._residency.gives_way(name)

    def woken(self) -> None:
        """Say that a model's state has changed: whoever waits looks again."""
        self._moved.set()
        self._moved = asyncio.Event()

    def _carry_out(self, decision: Decision) -> None:
        for name in decision.load:
            self._seats[name].may_load.set()
        for name in decision.unload:
            self._seats[name].must_leave.set()

    def _tell(self) -> None:
        self._news.set()

    def _seat(self, name: str) -> _Seat:
        """Return the seat of a model that there is: it is kept for ever."""
        seat = self._every.get(name)
        if seat is None:
            seat = self._every[name] = _Seat()
        return seat

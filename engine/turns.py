"""Lets a few jobs run at a time, a bounded number of them for one owner; those who wait go in turn, owner by owner."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

from engine.errors import OverloadedError


class FairTurns:
    """`total` turns, at most `per_owner` of them for one owner. With fewer than all, no owner ever stops the others."""

    def __init__(self, total: int, *, per_owner: int, most_waiting: int, wait_seconds: float) -> None:
        self._free = total
        self._per_owner = per_owner
        self._most_waiting = most_waiting
        self._wait_seconds = wait_seconds
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, owner: str) -> None:
        """Wait for a turn; `leave` gives it back. Raises `OverloadedError` when too many wait, or for too long."""
        line = self._waiting.setdefault(owner, deque())
        if len(line) >= self._most_waiting:
            raise _overloaded()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._admit()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self.leave(owner)
            elif turn in line:
                line.remove(turn)
                self._admit()
            if isinstance(error, TimeoutError):
                raise _overloaded() from None
            raise

    def leave(self, owner: str) -> None:
        """Give back a turn of the owner's."""
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._admit()

    def _admit(self) -> None:
        """Give out the free turns. Whoever got one goes to the end of the owners."""
        for owner in list(self._waiting):
            line = self._waiting[owner]
            while line and line[0].cancelled():  # it is about to leave
                line.popleft()
            if line and self._free and self._running[owner] < self._per_owner:
                turn = line.popleft()
                self._free -= 1
                self._running[owner] += 1
                turn.set_result(None)
                self._waiting.move_to_end(owner)
            if not line:
                del self._waiting[owner]


def _overloaded() -> OverloadedError:
    return OverloadedError(
        "Too many new JSON schemas are waiting to be prepared. Try again in a few seconds, and send fewer different "
        "schemas at the same time.",
        retry_after_seconds=10,
    )

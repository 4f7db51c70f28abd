"""Keeps background requests from filling a model's queue: interactive ones must always get in."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class BackgroundSlots:
    """So many sequences of background work at once; more wait in the order in which they came."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._size = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, sequences: int) -> AsyncIterator[None]:
        """Wait for room for `sequences`, at most the whole size, and hold it."""
        wanted = min(sequences, self._size)
        await self._enter(wanted)
        try:
            yield
        finally:
            self._leave(wanted)

    async def _enter(self, wanted: int) -> None:
        if not self._waiting and wanted <= self._free:
            self._free -= wanted
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self._leave(wanted)
            else:
                self._waiting.remove((wanted, turn))
                self._leave(0)
            raise

    def _leave(self, wanted: int) -> None:
        self._free += wanted
        while self._waiting and self._waiting[0][0] <= self._free:
            taken, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._free -= taken
            turn.set_result(None)

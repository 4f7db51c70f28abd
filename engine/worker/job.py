"""One job of a worker as its parent sees it: what came and was not read yet, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.errors import EngineError


class Job:
    """Filled by the process's channel, read by one `run`."""

    def __init__(self) -> None:
        self.unread_bytes = 0
        self.ended = asyncio.Event()
        self._unread: deque[bytes] = deque()
        self._error: EngineError | None = None
        self._changed = asyncio.Event()
        self._discarding = False

    def add(self, payload: bytes) -> None:
        """Keep an event until it is read."""
        if not self._discarding:
            self._unread.append(payload)
            self.unread_bytes += len(payload)
            self._changed.set()

    def end(self, error: EngineError | None = None, *, at_once: bool = False) -> None:
        """No more will come. `at_once`: what is unread is not worth reading any more."""
        if at_once:
            self._forget()
        self._error = error
        self.ended.set()
        self._changed.set()

    def discard(self) -> None:
        """Nobody reads any more."""
        self._discarding = True
        self._forget()

    async def next(self) -> bytes | None:
        """Return the next event, None after the last; raises what ended the job, after its events."""
        while not self._unread:
            if self.ended.is_set():
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        payload = self._unread.popleft()
        self.unread_bytes -= len(payload)
        return payload

    def _forget(self) -> None:
        self._unread.clear()
        self.unread_bytes = 0

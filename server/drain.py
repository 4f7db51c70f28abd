"""The end of a server's life: stop taking work, let running work finish, then cut what is left."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

_LAST_WRITES_SECONDS = 2.0


class Drain:
    """Counts running requests and says when they must stop. Belongs to one event loop."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # A future rather than an event: hundreds of streams can wait on it without a task each.
        self.expired: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def request(self) -> Self:
        """Count one running request (`with`)."""
        return self

    def __enter__(self) -> None:
        """It begins."""
        self.running += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        """It has ended."""
        self.running -= 1
        if self.running == 0:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Take no more work, wait up to `seconds` for what runs, then make the rest stop."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.cut()
            with suppress(TimeoutError):  # a client that does not read must not hold us up
                await asyncio.wait_for(self._idle.wait(), _LAST_WRITES_SECONDS)

    def cut(self) -> None:
        """Make everything that runs stop now, with an error to its client."""
        self.draining = True
        if not self.expired.done():
            self.expired.set_result(None)

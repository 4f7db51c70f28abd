"""What a worker has made and nobody has fetched yet, in the server's memory, within a bound."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from engine.errors import GenerationError

T = TypeVar("T")


class Outbox(Generic[T]):
    """From one task to one reader. A reader that does not read holds up nobody: past the bound the job fails."""

    def __init__(self, most_bytes: int) -> None:
        self._queue: asyncio.Queue[tuple[T | BaseException | None, int]] = asyncio.Queue()
        self._most_bytes = most_bytes
        self._bytes = 0

    def put(self, item: T, size_bytes: int) -> None:
        """Add something. Raises `GenerationError` when too much lies here."""
        self._bytes += size_bytes
        if self._bytes > self._most_bytes:
            raise GenerationError("The answer was not read for too long and was given up. Read it while it comes.")
        self._queue.put_nowait((item, size_bytes))

    def end(self, error: BaseException | None = None) -> None:
        """Nothing follows; the reader gets `error`."""
        self._queue.put_nowait((error, 0))

    async def get(self) -> T | None:
        """Return what comes next, None at the end. Raises what it ended with."""
        item, size_bytes = await self._queue.get()
        self._bytes -= size_bytes
        if isinstance(item, BaseException):
            raise item
        return item

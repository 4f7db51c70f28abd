"""What one request is answered with, item by item: written by the model's side, read by the request's owner."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """From one maker to one reader, in one event loop. It ends once: read to its end, failed, or closed.

    `sink` may be set by the reader: it is offered each item at the moment it is made, and the item is queued where it
    returns False. `on_abort` is the maker's: awaited when the reader closes what has not been finished.
    """

    __slots__ = ("_at_end", "_closed", "_ended", "_error", "_finished", "_next", "_unread", "on_abort", "sink")

    def __init__(self) -> None:
        self.sink: Callable[[T], bool] | None = None
        self.on_abort: Callable[[], Awaitable[object]] | None = None
        self._unread: deque[T] = deque()
        self._error: BaseException | None = None
        self._next: asyncio.Future[None] | None = None  # the reader waits for it
        self._at_end = ExitStack()
        self._finished = self._closed = self._ended = False

    def put(self, item: T) -> None:
        """Add an item. What comes after the end is dropped."""
        if self._finished or self._closed:
            return
        if self._unread or self.sink is None or not self.sink(item):
            self._unread.append(item)
            self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        """Say that nothing follows. The reader gets `error` after all that was queued before."""
        if not self._finished:
            self._finished, self._error = True, error
            self._wake()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call it once when the stream ends, the last registered first; now, if it has ended."""
        if self._ended:
            callback()
        else:
            self._at_end.callback(callback)

    def __aiter__(self) -> Self:
        """Read the items, in one task at a time. Raises what the stream was finished with."""
        return self

    async def __anext__(self) -> T:
        """Return the next item. A cancelled wait loses nothing, and ends nothing: closing does."""
        while not self._unread:
            if self._closed:
                raise StopAsyncIteration
            if self._finished:
                error, self._error = self._error, None
                self._end()
                raise StopAsyncIteration if error is None else error
            self._next = asyncio.get_running_loop().create_future()
            try:
                await self._next
            finally:
                self._next = None
        return self._unread.popleft()

    async def aclose(self) -> None:
        """Want no more. Returns when the maker has stopped; safe to call at any time."""
        if self._closed or self._ended:
            return
        self._closed = True
        self._unread.clear()
        self._error = None
        try:
            if not self._finished and self.on_abort is not None:
                await self.on_abort()
        finally:
            self._error = None
            self._end()
            self._wake()

    def _wake(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    def _end(self) -> None:
        self._ended = True
        self._at_end.close()  # the last first, each whatever another one raises

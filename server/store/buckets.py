"""Limits per minute: buckets in the database, shared exactly by every process that uses it.

What is limited and how much is the caller's; the arithmetic is `gcra.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from server.store.bucket_statements import BucketStatements, Work
from server.store.errors import StoreUnavailableError
from server.store.gcra import Ask, Level, Refused, Taken, TooLarge
from server.store.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from server.store.database import Database

T = TypeVar("T")


class Buckets:
    """Takes from buckets and gives back. Use as `async with`, on one event loop.

    Exact: nothing is handed out ahead, so of any number of takes in any number of processes as many pass as
    fit. What was given back is on its way to the database for up to `return_every_seconds`; a killed process
    loses that much and gains nothing. After a jump of the clock a bucket is shut no longer than an empty one.
    Commits are not synced: a power cut may refill what was taken in the last seconds.

    A take of two buckets costs 0.03 ms of CPU on SQLite while one follows the other, and ten times that when each
    wakes a resting core.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock_nanoseconds: Callable[[], int] = time.time_ns,
        wait_seconds: float = 5.0,
        return_every_seconds: float = 0.5,
    ) -> None:
        """`clock_nanoseconds` since 1970 counts on SQLite only; PostgreSQL uses its server's."""
        self._statements = BucketStatements(database, clock_nanoseconds)
        self._thread = LoopThread("buckets")
        self._wait_seconds = wait_seconds
        self._return_every_seconds = return_every_seconds
        self._returns: dict[str, int] = {}  # nanoseconds by bucket; at most one entry each, so it is bounded
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        with contextlib.suppress(StoreUnavailableError):  # tidying can wait for the next start
            await self._run(self._statements.forget_full, self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Write what was given back, and stop. A failing store does not hold up the shutdown for long."""
        with contextlib.suppress(StoreUnavailableError):
            await self.flush()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.run(self._statements.close)
        self._thread.close()

    async def take(self, *asks: Ask) -> Taken | Refused | TooLarge:
        """Take from all these buckets, or from none. Raises StoreUnavailableError.

        A caller that is cancelled gets nothing, and what was taken for it goes back.
        """
        for ask in asks:
            if ask.cost > ask.burst:
                return TooLarge(ask.bucket, ask.cost, ask.burst)
        return await self._run(self._statements.take, self._work(*asks))

    def charge(self, ask: Ask) -> None:
        """Take afterwards, for what was done already; it counts if it fits. Does not wait or fail."""
        self._thread.run(partial(self._statements.take, Work((ask,), {}, self._wait_seconds))).add_done_callback(_seen)

    def give_back(self, *asks: Ask) -> None:
        """Give back what was taken and not used; more than full a bucket never gets. Does not wait or fail."""
        for ask in asks:
            self._returns[ask.bucket] = self._returns.get(ask.bucket, 0) + ask.nanoseconds
        if self._returns and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._return_every_seconds, self._flush_now)

    async def levels(self, *asks: Ask) -> tuple[Level, ...]:
        """How full these buckets are; costs are ignored. Raises StoreUnavailableError."""
        return await self._run(self._statements.look, self._work(*asks))

    async def flush(self) -> None:
        """Write now what was given back. Raises StoreUnavailableError; it is then kept for later."""
        returns, self._returns = self._returns, {}
        if returns:
            await self._run(self._statements.give_back, Work((), returns, self._wait_seconds))

    def _work(self, *asks: Ask) -> Work:
        # What these buckets have to get back comes first, so that one's own returns are never missed
        returns = {ask.bucket: self._returns.pop(ask.bucket) for ask in asks if ask.bucket in self._returns}
        return Work(asks, returns, self._wait_seconds)

    async def _run(self, step: Callable[[Work], T], work: Work) -> T:
        answer = self._thread.run(partial(step, work))
        try:
            async with asyncio.timeout(2 * self._wait_seconds):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            answer.add_done_callback(partial(self._came_late, work))
            raise StoreUnavailableError("The key database does not answer. Try again in a few seconds.") from error
        except asyncio.CancelledError:
            answer.add_done_callback(partial(self._came_late, work))
            raise
        except StoreUnavailableError:
            self._keep_returns(work)
            raise

    def _came_late(self, work: Work, answer: asyncio.Future[T]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self._keep_returns(work)
        elif isinstance(answer.result(), Taken):
            self.give_back(*work.asks)

    def _keep_returns(self, work: Work) -> None:
        if not work.may_be_returned:
            for bucket, nanoseconds in work.returns.items():
                self._returns[bucket] = self._returns.get(bucket, 0) + nanoseconds

    def _flush_now(self) -> None:
        self._timer = None
        self._flushing = asyncio.ensure_future(self._try_to_flush())

    async def _try_to_flush(self) -> None:
        with contextlib.suppress(StoreUnavailableError):
            await self.flush()
        self.give_back()  # tries again later, if anything is left


def _seen(answer: asyncio.Future[Taken | Refused]) -> None:
    if not answer.cancelled():
        answer.exception()  # asyncio does not complain about it

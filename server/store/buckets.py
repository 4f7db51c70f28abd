"""Limits per minute: buckets in the database, shared exactly by every process that uses it.

A bucket is kept as one number: the time at which it would be full again (the generic cell rate algorithm's theoretical
arrival time, ITU-T I.371), in whole nanoseconds since 1970, so that no rounding lets a request too many through. What
is limited and how much is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from server.store.database import Database
from server.store.errors import StoreUnavailableError

T = TypeVar("T")
_SECOND = 1_000_000_000
_LONGEST_WINDOW = 2**61  # nanoseconds, 73 years: with the time of day still within 64 bits


@dataclass(frozen=True, slots=True)
class Ask:
    """`cost` units of the bucket with this name, which holds `burst` and refills at `rate_per_second`.

    Raises ValueError for numbers that make no bucket. A bucket with burst 0 holds nothing, ever.
    """

    bucket: str
    cost: float
    rate_per_second: float
    burst: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.cost, self.rate_per_second, self.burst))):
            raise ValueError(f"bucket {self.bucket}: cost, rate and burst must be finite numbers")
        if self.cost < 0 or self.burst < 0 or (self.rate_per_second <= 0 and self.burst > 0):
            raise ValueError(f"bucket {self.bucket}: cost and burst must not be negative, the rate positive")
        if self.window > _LONGEST_WINDOW:
            raise ValueError(f"bucket {self.bucket}: it would take more than 73 years to refill")

    @classmethod
    def per_minute(cls, bucket: str, cost: float, limit: float) -> Self:
        """A bucket that holds a minute's worth. With limit 0 it holds nothing."""
        return cls(bucket, cost, limit / 60, limit)

    @property
    def nanoseconds(self) -> int:
        """How long the cost takes to flow back."""
        return int(self.cost / self.rate_per_second * _SECOND) if self.rate_per_second else 0

    @property
    def window(self) -> int:
        """How long an empty bucket takes to fill, in nanoseconds."""
        return round(self.burst / self.rate_per_second * _SECOND) if self.rate_per_second else 0


@dataclass(frozen=True, slots=True)
class Level:
    """How full a bucket is: for the headers x-ratelimit-limit, -remaining and -reset (seconds until full)."""

    bucket: str
    limit: float
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class Taken:
    """All of it was taken. `levels` are those afterwards, in the order asked."""

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was taken: `bucket` is too empty, and for this cost will be so for `retry_after_seconds` at least."""

    bucket: str
    retry_after_seconds: float
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Nothing was taken, and waiting will not help: the cost is more than `bucket` ever holds."""

    bucket: str
    cost: float
    burst: float


def level_of(ask: Ask, tat: int | None, now: int) -> Level:
    used = min(ask.window, max(0, (tat or 0) - now))
    per_unit = _SECOND / ask.rate_per_second if ask.rate_per_second else 0
    # A hair is added before rounding down: 20 units that were cut to whole nanoseconds are still 20
    remaining = int((ask.window - used) / per_unit + 1e-6) if per_unit else 0
    return Level(ask.bucket, ask.burst, remaining, used / _SECOND)


def _retry_after_seconds(ask: Ask, tat: int | None, now: int) -> float:
    used = min(ask.window, max(0, (tat or 0) - now))
    return max(0, used + ask.nanoseconds - ask.window) / _SECOND


@dataclass(slots=True)
class _Change:
    """One transaction. `returns`, nanoseconds by bucket, are given back in it."""

    asks: Sequence[Ask]
    returns: Mapping[str, int]
    deadline: float
    committing: bool = field(default=False, init=False)  # after an error: it may have happened all the same


class Buckets:
    """Takes from buckets and gives back. Use as `async with`, on one event loop.

    Exact: nothing is handed out ahead, so of any number of takes in any number of processes as many pass as
    fit. What was given back is on its way to the database for up to `return_every_seconds`; a killed process
    loses that much and gains nothing. After a jump of the clock a bucket is shut no longer than an empty one.
    Commits are not synced: a power cut may refill what was taken in the last seconds.
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
        self._statements = _Statements(database, clock_nanoseconds)
        # A transaction in one thread on a plain connection takes a tenth of what it takes through asynchronous layers
        self._thread = ThreadPoolExecutor(1, "buckets")
        self._wait_seconds = wait_seconds
        self._return_every_seconds = return_every_seconds
        self._returns: dict[str, int] = {}  # nanoseconds by bucket; at most one entry each, so it is bounded
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        with contextlib.suppress(StoreUnavailableError):  # tidying can wait for the next start
            await self._run(self._statements.forget_full, self._change())
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
        self._thread.submit(self._statements.disconnect)
        self._thread.shutdown(wait=False)

    async def take(self, *asks: Ask) -> Taken | Refused | TooLarge:
        """Take from all these buckets, or from none. Raises StoreUnavailableError.

        A caller that is cancelled gets nothing, and what was taken for it goes back.
        """
        for ask in asks:
            if ask.cost > ask.burst:
                return TooLarge(ask.bucket, ask.cost, ask.burst)
        return await self._run(self._statements.take, self._change(*asks))

    def charge(self, ask: Ask) -> None:
        """Take afterwards, for what was done already; it counts if it fits. Does not wait or fail."""
        self._start(self._statements.take, self._change(ask))

    def give_back(self, *asks: Ask) -> None:
        """Give back what was taken and not used; more than full a bucket never gets. Does not wait or fail."""
        for ask in asks:
            self._keep({ask.bucket: ask.nanoseconds})

    async def levels(self, *asks: Ask) -> tuple[Level, ...]:
        """How full these buckets are; costs are ignored. Raises StoreUnavailableError."""
        return await self._run(self._statements.look, self._change(*asks))

    async def flush(self) -> None:
        """Write now what was given back. Raises StoreUnavailableError; it is then kept for later."""
        if self._returns:
            returns, self._returns = self._returns, {}
            change = _Change((), returns, time.monotonic() + self._wait_seconds)
            await self._run(self._statements.give_back, change)

    def _change(self, *asks: Ask) -> _Change:
        # What these buckets have to get back comes first, so that one's own returns are never missed
        returns = {ask.bucket: self._returns.pop(ask.bucket) for ask in asks if ask.bucket in self._returns}
        return _Change(asks, returns, time.monotonic() + self._wait_seconds)

    async def _run(self, step: Callable[[_Change], T], change: _Change) -> T:
        answer = self._start(step, change)
        try:
            async with asyncio.timeout(2 * self._wait_seconds):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            answer.add_done_callback(partial(self._came_late, change))
            raise StoreUnavailableError("The key database does not answer. Try again in a few seconds.") from error
        except asyncio.CancelledError:
            answer.add_done_callback(partial(self._came_late, change))
            raise

    def _start(self, step: Callable[[_Change], T], change: _Change) -> asyncio.Future[T]:
        answer = asyncio.get_running_loop().run_in_executor(self._thread, step, change)
        answer.add_done_callback(partial(self._ended, change))
        return answer

    def _ended(self, change: _Change, answer: asyncio.Future[Any]) -> None:
        # The error is seen here: whoever asked may have left
        if (answer.cancelled() or answer.exception() is not None) and not change.committing:
            self._keep(change.returns)

    def _came_late(self, change: _Change, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None and isinstance(answer.result(), Taken):
            self.give_back(*change.asks)

    def _keep(self, returns: Mapping[str, int]) -> None:
        """They are written soon, or with the next take."""
        for bucket, cost in returns.items():
            self._returns[bucket] = self._returns.get(bucket, 0) + cost
        if self._returns and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._return_every_seconds, self._flush_now)

    def _flush_now(self) -> None:
        self._timer = None
        returns, self._returns = self._returns, {}
        if returns:
            self._start(self._statements.give_back, _Change((), returns, time.monotonic() + self._wait_seconds))


class _Statements:
    """What runs in the thread. Errors are StoreUnavailableError; the next call then connects anew."""

    def __init__(self, database: Database, clock_nanoseconds: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock_nanoseconds
        self._sql = _SQL[database.kind]
        self._connection: Any = None
        self._cursor: Any = None  # one for all: making one is a tenth of what a statement costs

    def take(self, change: _Change) -> Taken | Refused:
        return self._run(change, self._take)

    def look(self, change: _Change) -> tuple[Level, ...]:
        return self._run(change, self._levels)

    def give_back(self, change: _Change) -> None:
        self._run(change, self._give_back)

    def forget_full(self, change: _Change) -> None:
        """Drop the rows of full buckets: none is needed to know that."""
        self._run(change, lambda _: self._cursor.execute(self._sql["forget"], {"now": self._clock()}))

    def disconnect(self) -> None:
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _run(self, change: _Change, step: Callable[[_Change], T]) -> T:
        if time.monotonic() > change.deadline:  # it waited behind others that found the database locked
            raise StoreUnavailableError("The key database is busy. Try again in a few seconds.")
        with self._database.translated():
            self._database.check()
            try:
                return self._in_transaction(change, step)
            except BaseException:
                # PostgreSQL was restarted since the last call: once more, unless it may have happened already
                again = getattr(self._connection, "broken", False) and not change.committing
                self.disconnect()
                if not again:
                    raise
            return self._in_transaction(change, step)

    def _in_transaction(self, change: _Change, step: Callable[[_Change], T]) -> T:
        if self._connection is None:
            self._connection = self._database.blocking_connection()
            self._cursor = self._connection.cursor()
        self._cursor.execute(self._sql["begin"])
        answer = step(change)
        change.committing = True
        self._cursor.execute("COMMIT")
        return answer

    def _take(self, change: _Change) -> Taken | Refused:
        levels: dict[str, Level] = {}
        # In one order everywhere: on PostgreSQL two takes would else wait for each other's rows
        for ask in sorted(change.asks, key=lambda ask: ask.bucket):
            if ask.bucket in change.returns:
                self._return(ask.bucket, change.returns[ask.bucket])
            row = self._ask("take", ask).fetchone()
            if row is None:
                for taken in change.asks:
                    if taken.bucket in levels:
                        self._return(taken.bucket, taken.nanoseconds)
                return self._refused(ask, change)
            levels[ask.bucket] = level_of(ask, *row)
        return Taken(tuple(levels[ask.bucket] for ask in change.asks))

    def _refused(self, ask: Ask, change: _Change) -> Refused:
        tat, now = self._ask("look", ask).fetchone()
        if tat is not None and tat - now > ask.window:
            # The clock was set back, or the limit lowered: without this the bucket would stay shut until then
            self._ask("bring_back", ask)
        return Refused(ask.bucket, _retry_after_seconds(ask, tat, now), self._levels(change))

    def _levels(self, change: _Change) -> tuple[Level, ...]:
        return tuple(level_of(ask, *self._ask("look", ask).fetchone()) for ask in change.asks)

    def _give_back(self, change: _Change) -> None:
        for bucket, cost in sorted(change.returns.items()):
            self._return(bucket, cost)

    def _return(self, bucket: str, cost: int) -> None:
        self._cursor.execute(self._sql["give_back"], {"bucket": bucket, "cost": cost})

    def _ask(self, statement: str, ask: Ask) -> Any:
        # Read here, after the wait for the write lock. PostgreSQL asks its own clock and ignores this one
        now = self._clock()
        values = {"bucket": ask.bucket, "cost": ask.nanoseconds, "window": ask.window, "now": now}
        return self._cursor.execute(self._sql[statement], values)


_STATEMENTS = {
    # No row comes back when it does not fit. The first of a bucket always fits: see TooLarge.
    "take": "INSERT INTO bucket (name, tat) VALUES (:bucket, :now + :cost) "
    "ON CONFLICT (name) DO UPDATE SET tat = :full + :cost WHERE :full + :cost - :now <= :window RETURNING tat, :now",
    "look": "SELECT (SELECT tat FROM bucket WHERE name = :bucket), :now",
    "bring_back": "UPDATE bucket SET tat = :now + :window WHERE name = :bucket AND tat > :now + :window",
    "give_back": "UPDATE bucket SET tat = tat - :cost WHERE name = :bucket",
    "forget": "DELETE FROM bucket WHERE tat < :now",
}


def _written(begin: str, greatest: str, now: str, placeholder: str) -> dict[str, str]:
    def written(sql: str) -> str:
        # :full is the bucket's time, or now where that has passed: a bucket is never more than full
        sql = sql.replace(":full", f"{greatest}(bucket.tat, :now)").replace(":now", now)
        for name in ("bucket", "cost", "window"):
            sql = sql.replace(f":{name}", placeholder.format(name))
        return sql

    return {"begin": begin} | {name: written(sql) for name, sql in _STATEMENTS.items()}


_SQL = {
    "sqlite": _written("BEGIN IMMEDIATE", "max", ":now", ":{}"),
    # The server's clock, so that hosts need not agree on theirs; read anew each time, after waiting for the row
    "postgresql": _written(
        "BEGIN", "greatest", "CAST(extract(epoch FROM clock_timestamp()) * 1000000000 AS bigint)", "%({})s"
    ),
}

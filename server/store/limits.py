"""What has been used of limits, counted in the database and shared exactly by every process that uses it.

`Buckets` are for limits per minute. A bucket is kept as one number: the time at which it would be full again (the
generic cell rate algorithm's theoretical arrival time, ITU-T I.371), in whole nanoseconds since 1970, so that no
rounding lets one request too many through. `Quotas` are for limits per day, and start over at midnight UTC. `Replicas`
are for limits on what runs at the same time. The caller decides what is limited, for whom and how much.
"""

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, Self

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.store import StoreUnavailableError
from server.store.database import Database, SideTasks, WrittenLater
from server.store.schema import quota_day, replica, utc_now

_SECOND = 1_000_000_000
_QUOTAS_KEPT = timedelta(days=31)
_GONE_SECONDS = 5.0  # without an update of a server's row
_FORGOTTEN_SECONDS = 3600.0
_log = logging.getLogger("hearth.limits")


@dataclass(frozen=True, slots=True)
class Ask:
    """`cost` units of the bucket with this name, which holds `limit` and refills in `seconds`.

    `kept`: this share of the bucket, 0 to 1, is left to others; for a cost above the rest, as much of it as possible.
    """

    bucket: str
    cost: float
    limit: float
    seconds: float = 60.0
    kept: float = 0.0

    @property
    def nanoseconds(self) -> int:
        """How long the cost takes to flow back."""
        return int(self.cost / self.limit * self.window) if self.limit else 0

    @property
    def window(self) -> int:
        """How long an empty bucket takes to fill, in nanoseconds."""
        return round(self.seconds * _SECOND)

    @property
    def open_window(self) -> int:
        """The part of it that may be empty afterwards."""
        return max(self.nanoseconds, round(self.window * (1 - self.kept)))

    def used(self, tat: int | None, now: int) -> int:
        """How long the bucket takes to be full again, in nanoseconds."""
        return min(self.window, max(0, (tat or 0) - now))

    def level(self, tat: int | None, now: int) -> "Level":
        used = self.used(tat, now)
        # A hair is added before rounding down: 20 units that were cut to whole nanoseconds are still 20
        remaining = int((self.window - used) / self.window * self.limit + 1e-6)
        return Level(self.bucket, self.limit, remaining, used / _SECOND)


@dataclass(frozen=True, slots=True)
class Level:
    """How full a bucket is: for the headers x-ratelimit-limit, -remaining and -reset (seconds until full)."""

    bucket: str
    limit: float
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was taken: the bucket is too empty, and for this cost will be so for `retry_after_seconds` at least.

    That is infinite, and the level is not known, where the cost is more than the bucket ever holds.
    """

    retry_after_seconds: float
    level: Level | None = None


@dataclass(slots=True)
class _Change:
    """One transaction. It first gives back `returns`, nanoseconds by bucket."""

    ask: Ask | None
    returns: Mapping[str, int]
    deadline: float
    committing: bool = field(default=False, init=False)  # an error after this: the change may have happened


class Buckets(WrittenLater):
    """Takes from buckets and gives back. Use as `async with`, on one event loop.

    Exact: nothing is handed out ahead, so exactly as many takes pass as fit, in any number of processes. What was given
    back reaches the database within `return_every_seconds`; a killed process loses that much and gains nothing.
    After a jump of the clock a bucket is shut no longer than an empty one.
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
        self._database = database
        self._clock = clock_nanoseconds
        self._statements = _STATEMENTS[database.kind]
        # A transaction in one thread takes a quarter of what it takes through asynchronous layers
        self._thread = ThreadPoolExecutor(1, "buckets")
        self._wait_seconds = wait_seconds
        self.flush_every_seconds = return_every_seconds
        self._returns: dict[str, int] = {}  # nanoseconds by bucket; at most one entry each, so it is bounded

    async def __aenter__(self) -> Self:
        with contextlib.suppress(StoreUnavailableError):  # tidying can wait for the next start
            await asyncio.get_running_loop().run_in_executor(self._thread, self._forget_full)
        return await super().__aenter__()

    async def close(self) -> None:
        await super().close()
        self._thread.shutdown(wait=False)

    async def take(self, ask: Ask) -> Level | Refused:
        """Take, and return the level afterwards. Raises StoreUnavailableError.

        A caller that is cancelled gets nothing, and what was taken for it goes back.
        """
        if ask.cost > ask.limit:
            return Refused(math.inf)
        self._database.check()  # the thread may still wait for it on behalf of others
        answer = await self._wait_for(self._change(ask.bucket, ask=ask))
        assert answer is not None  # noqa: S101  # something was asked for
        return answer

    def give_back(self, ask: Ask) -> None:
        """Give back what was taken and not used; a bucket never gets more than full. Does not wait or fail."""
        self._keep({ask.bucket: ask.nanoseconds})

    async def flush(self) -> None:
        """Write now what was given back. Raises StoreUnavailableError, and then keeps it for later."""
        if self._returns:
            self._database.check()
            await self._wait_for(self._change(*self._returns))

    def _change(self, *buckets: str, ask: Ask | None = None) -> _Change:
        # What these buckets have to get back is part of it, so that one's own returns are never missed
        returns = {bucket: self._returns.pop(bucket) for bucket in buckets if bucket in self._returns}
        return _Change(ask, returns, time.monotonic() + self._wait_seconds)

    async def _wait_for(self, change: _Change) -> Level | Refused | None:
        answer = asyncio.get_running_loop().run_in_executor(self._thread, self._write, change)
        answer.add_done_callback(partial(self._ended, change))
        try:
            async with asyncio.timeout(2 * self._wait_seconds):
                return await asyncio.shield(answer)
        except (TimeoutError, asyncio.CancelledError) as error:
            answer.add_done_callback(partial(self._came_late, change))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise StoreUnavailableError("The key database does not answer. Try again in a few seconds.") from error

    def _ended(self, change: _Change, answer: asyncio.Future[Level | Refused | None]) -> None:
        # The error is seen here: its caller may have left
        if (answer.cancelled() or answer.exception() is not None) and not change.committing:
            self._keep(change.returns)

    def _came_late(self, change: _Change, answer: asyncio.Future[Level | Refused | None]) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        if change.ask is not None and not failed and isinstance(answer.result(), Level):
            self.give_back(change.ask)

    def _keep(self, returns: Mapping[str, int]) -> None:
        """Write them soon, or with the next take."""
        for bucket, cost in returns.items():
            self._returns[bucket] = self._returns.get(bucket, 0) + cost

    # From here on in the thread

    def _forget_full(self) -> None:
        """Drop the rows of full buckets: none is needed to know that."""
        with self._database.blocking() as cursor:
            cursor.execute(self._statements["forget"], {"now": self._clock()})

    def _write(self, change: _Change) -> Level | Refused | None:
        if time.monotonic() > change.deadline:  # it waited for others while the database was locked
            raise StoreUnavailableError("The key database is busy. Try again in a few seconds.")
        with self._database.blocking() as cursor:
            # In one order everywhere: on PostgreSQL two processes would else wait for each other's rows
            for bucket, cost in sorted(change.returns.items()):
                cursor.execute(self._statements["give_back"], {"bucket": bucket, "cost": cost})
            answer = None if change.ask is None else self._take(cursor, change.ask)
            change.committing = True
        return answer

    def _take(self, cursor: Any, ask: Ask) -> Level | Refused:
        taken = self._execute(cursor, "take", ask).fetchone()
        if taken is not None:
            return ask.level(*taken)
        tat, now = self._execute(cursor, "look", ask).fetchone()
        if tat is not None and tat - now > ask.window:
            # The clock was set back, or the limit lowered: without this the bucket would stay shut until then
            self._execute(cursor, "bring_back", ask)
        wait = max(0, ask.used(tat, now) + ask.nanoseconds - ask.open_window) / _SECOND
        return Refused(wait, ask.level(tat, now))

    def _execute(self, cursor: Any, statement: str, ask: Ask) -> Any:
        # Read here, after the wait for the write lock. PostgreSQL asks its own clock and ignores this one
        now = self._clock()
        window = ask.open_window if statement == "take" else ask.window
        values = {"bucket": ask.bucket, "cost": ask.nanoseconds, "window": window, "now": now}
        return cursor.execute(self._statements[statement], values)


def _written(now: str) -> dict[str, str]:
    # :full is the bucket's time, or now where that has passed: a bucket is never more than full
    full = "CASE WHEN bucket.tat > :now THEN bucket.tat ELSE :now END"
    statements = {
        # No row comes back when it does not fit. The first of a bucket always fits: more than it holds is never asked.
        "take": "INSERT INTO bucket (name, tat) VALUES (:bucket, :now + :cost) ON CONFLICT (name) DO UPDATE "
        "SET tat = :full + :cost WHERE :full + :cost - :now <= :window RETURNING tat, :now",
        "look": "SELECT (SELECT tat FROM bucket WHERE name = :bucket), :now",
        "bring_back": "UPDATE bucket SET tat = :now + :window WHERE name = :bucket AND tat > :now + :window",
        "give_back": "UPDATE bucket SET tat = tat - :cost WHERE name = :bucket",
        "forget": "DELETE FROM bucket WHERE tat < :now",
    }
    return {name: sql.replace(":full", full).replace(":now", now) for name, sql in statements.items()}


# The server's clock, so that hosts need not agree on theirs; read anew each time, after waiting for the row.
_POSTGRESQL = _written("CAST(extract(epoch FROM clock_timestamp()) * 1000000000 AS bigint)")
_STATEMENTS = {
    "sqlite": _written(":now"),
    "postgresql": {name: re.sub(r":(\w+)", r"%(\1)s", sql) for name, sql in _POSTGRESQL.items()},
}


@dataclass(frozen=True, slots=True)
class QuotaTaken:
    """`count` were counted, on `day`."""

    owner: str
    kind: str
    count: int
    day: date


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Nothing was counted: only `remaining` of `limit` are left (`insufficient_quota`). A new day: `reset_seconds`."""

    limit: int
    remaining: int
    reset_seconds: float


class Quotas:
    """Counts per owner (a key's public id), kind (`images`) and UTC day. Use as `async with`, on one event loop."""

    def __init__(self, database: Database, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._clock = clock
        self._tidied: date | None = None
        self._tasks = SideTasks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()

    async def finish(self) -> None:
        """Wait until everything that was taken or given back is written."""
        await self._tasks.finish()

    async def take(self, owner: str, kind: str, count: int, per_day: int) -> QuotaTaken | QuotaExceeded:
        """Count `count` more, if no more than `per_day` are counted then. Exact across processes.

        For a caller that is cancelled nothing stays counted. Raises StoreUnavailableError.
        """
        taking = self._tasks.start(self._take(owner, kind, count, per_day))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._came_late)
            raise

    async def used(self, owner: str, kind: str) -> int:
        """Return how many were counted today. Raises StoreUnavailableError."""
        today = self._clock().astimezone(UTC).date()
        async with self._database.reading() as connection:
            query = select(quota_day.c.used).filter_by(owner=owner, kind=kind, day=today)
            return await connection.scalar(query) or 0

    def give_back(self, taken: QuotaTaken, unused: int) -> None:
        """Take `unused` of what was taken off the count. Does not wait or fail."""
        if unused > 0:
            self._tasks.start(self._give_back(taken, unused))

    async def _take(self, owner: str, kind: str, count: int, per_day: int) -> QuotaTaken | QuotaExceeded:
        now = self._clock().astimezone(UTC)
        row: dict[str, Any] = {"owner": owner, "kind": kind, "day": now.date()}
        async with self._database.writing(durable=False) as connection:
            await self._tidy(connection, now.date())
            if count <= per_day:
                statement = self._database.upsert(quota_day).values(**row, used=count)
                after = quota_day.c.used + statement.excluded.used
                statement = statement.on_conflict_do_update(
                    index_elements=list(row), set_={"used": after}, where=after <= per_day
                )
                if await connection.scalar(statement.returning(quota_day.c.used)) is not None:
                    return QuotaTaken(**row, count=count)
            used = await connection.scalar(select(quota_day.c.used).filter_by(**row)) or 0
        midnight = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), UTC)
        return QuotaExceeded(per_day, max(0, per_day - used), (midnight - now).total_seconds())

    async def _give_back(self, taken: QuotaTaken, unused: int) -> None:
        fewer = update(quota_day).filter_by(owner=taken.owner, kind=taken.kind, day=taken.day)
        left = case((quota_day.c.used >= unused, quota_day.c.used - unused), else_=0)
        try:
            async with self._database.writing(durable=False) as connection:
                await connection.execute(fewer.values(used=left))
        except StoreUnavailableError as error:
            _log.warning("%d %s of key %s stay counted for today: %s", unused, taken.kind, taken.owner, error.message)

    def _came_late(self, taking: asyncio.Task[QuotaTaken | QuotaExceeded]) -> None:
        if not taking.cancelled() and taking.exception() is None and isinstance(taken := taking.result(), QuotaTaken):
            self.give_back(taken, taken.count)

    async def _tidy(self, connection: AsyncConnection, day: date) -> None:
        if self._tidied != day:
            await connection.execute(delete(quota_day).where(quota_day.c.day < day - _QUOTAS_KEPT))
            self._tidied = day


class Replicas(WrittenLater):
    """How many requests of each key run in other servers of one PostgreSQL. Use as `async with`.

    Each server has a row, which it renews all the time. With SQLite there is one server, and nothing is written.
    A key's requests elsewhere are known to within a second; those of a server that has died count for 5 s. `running`
    says how many requests of each key run here; it is written by what counts them.
    """

    flush_every_seconds = 0.4  # delays the write and the read: with two queries, less than a second together

    def __init__(self, database: Database, name: str | None = None) -> None:
        self._database = database
        self._shared = database.kind == "postgresql"
        self._name = f"{name or 'server'}-{secrets.token_hex(4)}"[-64:]
        self.running: dict[str, int] = {}
        self._elsewhere = Counter[str]()

    async def __aenter__(self) -> Self:
        return await super().__aenter__() if self._shared else self

    def elsewhere(self, key: str) -> int:
        return self._elsewhere[key]

    async def flush(self) -> None:
        """Renew the row, and read those of the others."""
        now = func.extract("epoch", func.clock_timestamp())  # the database's clock: theirs may differ
        row = {"renewed_at": now, "running": {key: number for key, number in self.running.items() if number}}
        mine = self._database.upsert(replica).values(id=self._name, **row)
        others = select(replica.c.running).where(replica.c.id != self._name, replica.c.renewed_at > now - _GONE_SECONDS)
        try:
            async with self._database.writing(durable=False) as connection:
                await connection.execute(mine.on_conflict_do_update(index_elements=["id"], set_=row))
                found = (await connection.execute(others)).scalars().all()
        except StoreUnavailableError:
            self._elsewhere.clear()  # better to allow too many for a moment than to count those of a dead server
            raise
        self._elsewhere = Counter()
        for running in found:
            self._elsewhere.update(running)

    async def close(self) -> None:
        """Take the row away, and what dead servers have left."""
        await self.tasks.cancel()
        if not self._shared:
            return
        now = func.extract("epoch", func.clock_timestamp())
        old = (replica.c.id == self._name) | (replica.c.renewed_at < now - _FORGOTTEN_SECONDS)
        with contextlib.suppress(StoreUnavailableError):  # the row counts for 5 s only
            await self._database.change(delete(replica).where(old), durable=False)

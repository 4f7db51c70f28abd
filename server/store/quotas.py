"""Quotas per day, such as images: counters in the database that start anew at midnight UTC.

What is counted, for whom and up to which number is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.store.api_key import utc_now
from server.store.database import Database
from server.store.schema import quota_day, upsert

_KEPT = timedelta(days=31)


@dataclass(frozen=True, slots=True)
class QuotaTaken:
    """It was counted, on `day`. `reset_seconds` until the next one starts."""

    day: date
    used: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Nothing was counted: only `remaining` of `limit` are left (`insufficient_quota`). A new day: `reset_seconds`."""

    used: int
    limit: int
    remaining: int
    reset_seconds: float


class Quotas:
    """Counts per owner (a key's public id), kind (`images`) and UTC day. May raise StoreUnavailableError."""

    def __init__(self, database: Database, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._clock = clock
        self._tidied: date | None = None

    async def take(self, owner: str, kind: str, count: int, per_day: int) -> QuotaTaken | QuotaExceeded:
        """Count `count` more, if no more than `per_day` are counted then. Exact across processes."""
        if count < 0:
            raise ValueError("a quota cannot be taken negatively; see give_back")
        now = self._clock().astimezone(UTC)
        day, reset_seconds = now.date(), _until_midnight(now)
        row = {"owner": owner, "kind": kind, "day": day}
        async with self._database.writing(durable=False) as connection:
            await self._tidy(connection, day)
            if count <= per_day:
                statement = upsert(connection, quota_day).values(**row, used=count)
                after = quota_day.c.used + statement.excluded.used
                statement = statement.on_conflict_do_update(
                    index_elements=list(row), set_={"used": after}, where=after <= per_day
                )
                taken: int | None = await connection.scalar(statement.returning(quota_day.c.used))
                if taken is not None:
                    return QuotaTaken(day, taken, per_day - taken, reset_seconds)
            used = await _used(connection, owner, kind, day)
        return QuotaExceeded(used, per_day, max(0, per_day - used), reset_seconds)

    async def give_back(self, owner: str, kind: str, count: int, day: date) -> None:
        """Uncount what was taken on `day` and not used; never below zero."""
        is_it = (quota_day.c.owner == owner) & (quota_day.c.kind == kind) & (quota_day.c.day == day)
        enough = quota_day.c.used >= count
        async with self._database.writing(durable=False) as connection:
            fewer = update(quota_day).where(is_it, enough).values(used=quota_day.c.used - count)
            if (await connection.execute(fewer)).rowcount == 0:
                await connection.execute(update(quota_day).where(is_it).values(used=0))

    async def used(self, owner: str, kind: str) -> int:
        """How much is counted today."""
        day = self._clock().astimezone(UTC).date()
        async with self._database.reading() as connection:
            return await _used(connection, owner, kind, day)

    async def _tidy(self, connection: AsyncConnection, day: date) -> None:
        if self._tidied != day:
            await connection.execute(delete(quota_day).where(quota_day.c.day < day - _KEPT))
            self._tidied = day


async def _used(connection: AsyncConnection, owner: str, kind: str, day: date) -> int:
    is_it = (quota_day.c.owner == owner) & (quota_day.c.kind == kind) & (quota_day.c.day == day)
    used: int | None = await connection.scalar(select(quota_day.c.used).where(is_it))
    return used or 0


def _until_midnight(now: datetime) -> float:
    midnight = datetime.combine(now.date() + timedelta(days=1), time(), UTC)
    return (midnight - now).total_seconds()

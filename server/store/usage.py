"""What was used per key, model, hour and kind of request: how it is counted, and how the sums are read.

Counting in memory and writing now and then is `usage_book.py`'s.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import func, select

from server.store.schema import COUNTERS, usage_hour

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import ColumnElement

    from server.store.database import Database

GroupBy = Literal["hour", "day", "key", "model", "kind"]
BY_DAY: tuple[GroupBy, ...] = ("day",)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one or many requests used. `errors` and `aborted` are requests too, and counted in `requests`."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    audio_seconds: float = 0.0
    errors: int = 0
    aborted: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, _values_of(self), _values_of(other)))


FIELDS = tuple(field.name for field in fields(Usage))
_values_of = operator.attrgetter(*FIELDS)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A sum. What was not grouped by is None; `start` is that of the hour or the day, in UTC."""

    start: datetime | None
    key: str | None
    model: str | None
    kind: str | None
    usage: Usage


def hour_of(at: datetime) -> int:
    """Hours since 1970 UTC. Days are 24 of them."""
    return (at - _EPOCH) // timedelta(hours=1)


async def read_usage(  # noqa: PLR0913 - what to choose, and how to sum it up
    database: Database,
    since: datetime,
    until: datetime,
    *,
    key: str | None = None,
    model: str | None = None,
    group_by: Collection[GroupBy] = BY_DAY,
) -> list[UsageRow]:
    """Sums of whole hours: from the hour of `since` on, up to the last hour that starts before `until`.

    `key` and `model` leave out all others. Ordered by start, key, model and kind. Datetimes must be aware.
    Raises StoreUnavailableError.
    """
    start = usage_hour.c.hour if "hour" in group_by else (usage_hour.c.hour // 24) * 24
    groups: dict[str, ColumnElement[Any]] = {}
    if "hour" in group_by or "day" in group_by:
        groups["start"] = start.label("start")
    columns = {"key": usage_hour.c.key_id, "model": usage_hour.c.model, "kind": usage_hour.c.kind}
    groups |= {name: column.label(name) for name, column in columns.items() if name in group_by}
    sums = [func.coalesce(func.sum(usage_hour.c[name]), 0).label(name) for name in FIELDS]
    end = -((_EPOCH - until) // timedelta(hours=1))  # rounded up
    query = select(*groups.values(), *sums).where(usage_hour.c.hour >= hour_of(since), usage_hour.c.hour < end)
    if key is not None:
        query = query.where(usage_hour.c.key_id == key)
    if model is not None:
        query = query.where(usage_hour.c.model == model)
    query = query.group_by(*groups.values()).order_by(*groups.values())
    async with database.reading() as connection:
        return [_row(dict(row)) for row in (await connection.execute(query)).mappings()]


def _row(values: dict[str, Any]) -> UsageRow:
    start = values.get("start")
    # PostgreSQL sums whole numbers as decimals
    counted: dict[str, Any] = {name: int(values[name]) for name in COUNTERS}
    return UsageRow(
        start=None if start is None else _EPOCH + timedelta(hours=int(start)),
        key=values.get("key"),
        model=values.get("model"),
        kind=values.get("kind"),
        usage=Usage(**counted, audio_seconds=float(values["audio_seconds"])),
    )

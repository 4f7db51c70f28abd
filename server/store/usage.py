"""Usage per key, model, hour and kind of request: added up in memory, written every few seconds, read in sums."""

import asyncio
import logging
import operator
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

from sqlalchemy import RowMapping, func, select

from server.store.database import Database, WrittenLater
from server.store.schema import COUNTERS, usage_hour, utc_now

GroupBy = Literal["hour", "day", "key", "model", "kind"]
_BY_DAY: tuple[GroupBy, ...] = ("day",)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)
_PER_STATEMENT = 500  # rows; more at once would hold the loop too long
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one or many requests used. `requests` includes `errors` and `aborted`."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    audio_seconds: float = 0.0
    errors: int = 0
    aborted: int = 0

    def __add__(self, other: "Usage") -> "Usage":
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


class _Line(NamedTuple):
    hour: int  # since 1970 UTC; a day is 24
    key_id: str
    model: str
    kind: str


class UsageBook(WrittenLater):
    """Adds up usage per key, model, hour and kind. Use as `async with`.

    While the store fails, up to `max_lines` sums are kept; then the oldest hours are dropped and the log
    says how many. A killed process loses the last `flush_every_seconds`. If a connection breaks during a
    commit, it is unknown whether that happened; the sums are then written again rather than lost.
    """

    def __init__(self, database: Database, *, flush_every_seconds: float = 5.0, max_lines: int = 50_000) -> None:
        self._database = database
        self.flush_every_seconds = flush_every_seconds
        self._max_lines = max_lines
        self._lines: dict[_Line, Usage] = {}
        self._writing = asyncio.Lock()

    def add(self, key: str, model: str, kind: str, usage: Usage, at: datetime | None = None) -> None:
        """Count what a request used: `key` by its public id, `kind` like `chat`. In memory: never waits or fails."""
        self._keep({_Line(((at or utc_now()) - _EPOCH) // _HOUR, key, model, kind): usage})

    async def flush(self) -> None:
        """Write everything in one transaction. On StoreUnavailableError it is kept for the next time."""
        # A task of its own: a caller that leaves must not cut off a commit and have its sums written twice
        await asyncio.shield(asyncio.create_task(self._flush()))

    async def read(
        self,
        since: datetime,
        until: datetime,
        *,
        key: str | None = None,
        model: str | None = None,
        group_by: Collection[GroupBy] = _BY_DAY,
    ) -> list[UsageRow]:
        """Sums of whole hours: from the hour of `since` on, up to the last hour that starts before `until`.

        As written up to the last flush. `key` and `model` leave out all others. Ordered by start, key, model and kind.
        Datetimes must be aware. Raises StoreUnavailableError.
        """
        table = usage_hour.c
        start = table.hour if "hour" in group_by else (table.hour // 24) * 24
        columns = {"start": start, "key": table.key_id, "model": table.model, "kind": table.kind}
        named = {"start" if group in {"hour", "day"} else group for group in group_by}
        by = [column.label(name) for name, column in columns.items() if name in named]
        end = -((_EPOCH - until) // _HOUR)  # rounded up
        wanted = [table.hour >= (since - _EPOCH) // _HOUR, table.hour < end]
        wanted += [table.key_id == key] if key is not None else []
        wanted += [table.model == model] if model is not None else []
        sums = [func.coalesce(func.sum(table[name]), 0).label(name) for name in FIELDS]
        query = select(*by, *sums).where(*wanted).group_by(*by).order_by(*by)
        return [_row(row) for row in await self._database.rows(query)]

    async def _flush(self) -> None:
        async with self._writing:
            lines, self._lines = self._lines, {}
            try:
                await self._write(lines)
            except BaseException:
                self._keep(lines)
                dropped = sorted(self._lines)[: max(0, len(self._lines) - self._max_lines)]
                for line in dropped:
                    del self._lines[line]
                if dropped:
                    _log.error("usage of %d key-hours is lost: the key database has failed for too long", len(dropped))
                raise

    async def _write(self, lines: dict[_Line, Usage]) -> None:
        if not lines:
            return
        # In one order everywhere: on PostgreSQL two processes would else wait for each other's rows
        rows: list[dict[str, Any]] = [line._asdict() | asdict(lines[line]) for line in sorted(lines)]
        async with self._database.writing() as connection:
            insert = self._database.upsert(usage_hour)
            statement = insert.on_conflict_do_update(
                index_elements=list(usage_hour.primary_key.columns),
                set_={name: usage_hour.c[name] + insert.excluded[name] for name in FIELDS},
            )
            for first in range(0, len(rows), _PER_STATEMENT):
                await connection.execute(statement, rows[first : first + _PER_STATEMENT])

    def _keep(self, lines: dict[_Line, Usage]) -> None:
        for line, usage in lines.items():
            known = self._lines.get(line)
            self._lines[line] = usage if known is None else known + usage

    def unwritten(self) -> str:
        return f"usage in {len(self._lines)} lines is"


def _row(row: RowMapping) -> UsageRow:
    hour = row.get("start")
    start = None if hour is None else _EPOCH + int(hour) * _HOUR
    # PostgreSQL sums whole numbers as decimals
    counted: dict[str, Any] = {name: int(row[name]) for name in COUNTERS}
    usage = Usage(**counted, audio_seconds=float(row["audio_seconds"]))
    return UsageRow(start, row.get("key"), row.get("model"), row.get("kind"), usage)

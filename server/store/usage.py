"""Usage per key, model, hour and kind of request: added up in memory, written every few seconds, read in sums."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from sqlalchemy import ColumnElement, func, select

from server.store.database import Database
from server.store.errors import StoreUnavailableError
from server.store.schema import COUNTERS, upsert, usage_hour, utc_now

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


logger = logging.getLogger(__name__)

_PER_STATEMENT = 500  # rows; more at once would hold the loop too long


class _Line(NamedTuple):
    hour: int
    key_id: str
    model: str
    kind: str


class UsageBook:
    """Adds up usage per key, model, hour and kind. Use as `async with`.

    While the store fails, up to `max_lines` sums are kept; past that the oldest hours are dropped and the log
    says how many. A killed process loses the last `flush_every_seconds`. Where a connection breaks in the
    middle of a commit nobody can tell whether it happened; it is then written again rather than lost.
    """

    def __init__(
        self,
        database: Database,
        *,
        flush_every_seconds: float = 5.0,
        max_lines: int = 50_000,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._database = database
        self._flush_every_seconds = flush_every_seconds
        self._max_lines = max_lines
        self._clock = clock
        self._lines: dict[_Line, Usage] = {}
        self._writing = asyncio.Lock()
        self._stop = asyncio.Event()
        self._flushing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._flushing = asyncio.create_task(self._flush_until_stopped())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and write what is left. A failing store does not hold up the shutdown."""
        self._stop.set()
        if self._flushing is not None:
            await self._flushing
        await self._try_to_flush()

    def add(self, key: str, model: str, kind: str, usage: Usage, at: datetime | None = None) -> None:
        """Count what a request used: `key` by its public id, `kind` like `chat`. In memory: never waits or fails."""
        line = _Line(hour_of(at or self._clock()), key, model, kind)
        known = self._lines.get(line)
        self._lines[line] = usage if known is None else known + usage

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
        group_by: Collection[GroupBy] = BY_DAY,
    ) -> list[UsageRow]:
        """Sums of whole hours: from the hour of `since` on, up to the last hour that starts before `until`.

        As written up to the last flush. `key` and `model` leave out all others. Ordered by start, key, model and kind.
        Datetimes must be aware. Raises StoreUnavailableError.
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
        async with self._database.reading() as connection:
            return [_row(dict(row)) for row in (await connection.execute(query)).mappings()]

    async def _flush(self) -> None:
        async with self._writing:
            lines, self._lines = self._lines, {}
            try:
                await self._write(lines)
            except BaseException:
                self._keep(lines)
                raise

    async def _write(self, lines: dict[_Line, Usage]) -> None:
        if not lines:
            return
        # In one order everywhere: on PostgreSQL two processes would else wait for each other's rows
        rows: list[dict[str, Any]] = [line._asdict() | asdict(lines[line]) for line in sorted(lines)]
        async with self._database.writing(durable=False) as connection:
            insert = upsert(connection, usage_hour)
            counted = (*COUNTERS, "audio_seconds")
            statement = insert.on_conflict_do_update(
                index_elements=list(usage_hour.primary_key.columns),
                set_={name: usage_hour.c[name] + insert.excluded[name] for name in counted},
            )
            for first in range(0, len(rows), _PER_STATEMENT):
                await connection.execute(statement, rows[first : first + _PER_STATEMENT])

    def _keep(self, lines: dict[_Line, Usage]) -> None:
        for line, usage in lines.items():
            self._lines[line] = self._lines.get(line, Usage()) + usage
        dropped = sorted(self._lines)[: max(0, len(self._lines) - self._max_lines)]
        for line in dropped:
            del self._lines[line]
        if dropped:
            logger.error("usage of %d key-hours is lost: the key database has failed for too long", len(dropped))

    async def _flush_until_stopped(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._flush_every_seconds)
            await self._try_to_flush()

    async def _try_to_flush(self) -> None:
        try:
            await self.flush()
        except StoreUnavailableError as error:
            logger.warning("usage in %d lines is not written yet: %s", len(self._lines), error.message)


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

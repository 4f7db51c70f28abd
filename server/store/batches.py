"""The rows of files and batches: owner, state and the process that runs a batch.

`server/batches` has the files on the disk, and the progress from line to line. Moments are Unix seconds.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import Select, delete, func, insert, or_, select, update

from server.store import StoreError
from server.store.database import Database
from server.store.schema import api_key
from server.store.schema import batch as batch_table
from server.store.schema import file as file_table

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
ENDED: tuple[Status, ...] = ("completed", "failed", "expired", "cancelled")


class FullError(StoreError):
    """A key has reached a limit; the message names it."""


class InUseError(StoreError):
    """A file cannot be deleted: a batch reads it. `batch` is its id."""

    def __init__(self, batch: str) -> None:
        super().__init__("A batch reads this file.")
        self.batch = batch


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, without its bytes. `key_id` is its owner's public id."""

    id: str
    key_id: str
    place: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as its row says. `labels` are the client's `metadata`; `errors` those of its validation."""

    id: str
    key_id: str
    place: str
    input_file_id: str
    endpoint: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    labels: dict[str, str] | None = None
    output_seconds: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    model: str | None = None
    usage: dict[str, int] | None = None
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    runner: str | None = None
    leased_until: float = 0.0


def new_id(prefix: str) -> str:
    """Make an id. Those of later files and batches are larger, and none can be guessed."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


class BatchStore:
    """Files and batches in a database. Any method may raise StoreUnavailableError. `clock` gives Unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock

    async def owners(self, key: str) -> tuple[str, ...]:
        """A key and those that it has replaced: it owns what they owned."""
        found = [key]
        for one in found:
            older = select(api_key.c.public_id).where(api_key.c.replaced_by == one)
            found += [row["public_id"] for row in await self._database.rows(older)]
        return tuple(found)

    async def kept_bytes(self, owners: Collection[str]) -> int:
        """How much the files of these keys take together."""
        async with self._database.reading() as connection:
            return int((await connection.execute(_kept(owners))).scalar_one())

    async def add_file(self, new: StoredFile, owners: Collection[str], *, most_bytes: int) -> None:
        """Write the row of a file that is in its place. Raises `FullError` if its owners then exceed `most_bytes`."""
        async with self._database.writing() as connection:
            await connection.execute(_of_one_at_a_time(new.key_id))
            if int((await connection.execute(_kept(owners))).scalar_one()) + new.bytes > most_bytes:
                raise FullError("files")
            await connection.execute(insert(file_table).values(asdict(new)))

    async def file(self, id_: str, owners: Collection[str]) -> StoredFile | None:
        """The file of this id, if these own it; None if there is none, or it has expired."""
        mine = (file_table.c.id == id_) & file_table.c.key_id.in_(owners)
        row = await self._database.first(select(file_table).where(mine, file_table.c.expires_at > self.clock()))
        return None if row is None else StoredFile(**row)

    async def files(
        self,
        owners: Collection[str],
        *,
        limit: int,
        after: str | None = None,
        ascending: bool = False,
        purpose: str | None = None,
    ) -> list[StoredFile]:
        """The files of these, newest first unless `ascending`; those behind the id `after`."""
        query = select(file_table).where(file_table.c.key_id.in_(owners), file_table.c.expires_at > self.clock())
        if purpose is not None:
            query = query.where(file_table.c.purpose == purpose)
        query = _page(query, file_table.c.id, limit=limit, after=after, ascending=ascending)
        return [StoredFile(**row) for row in await self._database.rows(query)]

    async def delete_file(self, id_: str, owners: Collection[str]) -> StoredFile | None:
        """Delete the row of a file, and return it; None if these have no such file. Raises `InUseError`."""
        reads = select(batch_table.c.id).where(batch_table.c.input_file_id == id_, batch_table.c.status.in_(UNFINISHED))
        mine = (file_table.c.id == id_) & file_table.c.key_id.in_(owners)
        async with self._database.writing() as connection:
            row = (await connection.execute(select(file_table).where(mine))).mappings().one_or_none()
            if row is None:
                return None
            reader = (await connection.execute(reads.limit(1))).scalar_one_or_none()
            if reader is not None:
                raise InUseError(reader)
            await connection.execute(delete(file_table).where(mine))
        return StoredFile(**row)

    async def forget_old(self, place: str, *, batches_before: float) -> list[str]:
        """Delete rows of files that expired, or whose key is revoked, if no batch reads them; and of old batches.

        Returns the ids of these files.
        """
        reads = select(batch_table.c.input_file_id).where(batch_table.c.status.in_(UNFINISHED))
        unreadable = (file_table.c.expires_at <= self.clock()) | file_table.c.key_id.in_(_revoked_without_successor())
        old = unreadable & file_table.c.id.not_in(reads)
        ended = batch_table.c.status.in_(ENDED) & (batch_table.c.expires_at < batches_before)
        files = select(file_table.c.id)
        output = batch_table.c.output_file_id.in_(files) | batch_table.c.error_file_id.in_(files)
        async with self._database.writing(durable=False) as connection:
            forgotten = delete(file_table).where(file_table.c.place == place, old).returning(file_table.c.id)
            ids = list((await connection.execute(forgotten)).scalars())
            # NULL: there is no such file
            await connection.execute(
                delete(batch_table).where(batch_table.c.place == place, ended, func.coalesce(output, False).is_(False))
            )
        return ids

    async def known_files(self, ids: Collection[str]) -> set[str]:
        """Which of these have a row."""
        found = await self._database.rows(select(file_table.c.id).where(file_table.c.id.in_(ids)))
        return {row["id"] for row in found}

    async def add_batch(self, new: Batch, owners: Collection[str], *, most: int) -> None:
        """Write the row of a batch. Raises `FullError` if its owners have so many that have not ended."""
        theirs = select(func.count()).select_from(batch_table)
        theirs = theirs.where(batch_table.c.key_id.in_(owners), batch_table.c.status.in_(UNFINISHED))
        async with self._database.writing() as connection:
            await connection.execute(_of_one_at_a_time(new.key_id))
            if int((await connection.execute(theirs)).scalar_one()) >= most:
                raise FullError("batches")
            await connection.execute(insert(batch_table).values(asdict(new)))

    async def batch(self, id_: str, owners: Collection[str] | None = None) -> Batch | None:
        """The batch of this id, if one of these owns it; `owners` None: any batch."""
        query = select(batch_table).where(batch_table.c.id == id_)
        if owners is not None:
            query = query.where(batch_table.c.key_id.in_(owners))
        row = await self._database.first(query)
        return None if row is None else Batch(**row)

    async def batches(self, owners: Collection[str], *, limit: int, after: str | None = None) -> list[Batch]:
        """The batches of these, newest first; those behind the id `after`."""
        theirs = select(batch_table).where(batch_table.c.key_id.in_(owners))
        query = _page(theirs, batch_table.c.id, limit=limit, after=after)
        return [Batch(**row) for row in await self._database.rows(query)]

    async def unfinished(self, place: str) -> list[Batch]:
        """All of a place that have not ended, oldest first."""
        query = select(batch_table).where(batch_table.c.place == place, batch_table.c.status.in_(UNFINISHED))
        return [Batch(**row) for row in await self._database.rows(query.order_by(batch_table.c.id))]

    async def move(
        self,
        id_: str,
        expected: Iterable[Status],
        status: Status,
        *,
        runner: str | None = None,
        files: Iterable[StoredFile] = (),
        **fields: Any,
    ) -> bool:
        """Bring a batch from one of the expected states to another, with its files; False if it is in none of them.

        With `runner`, also if another one runs it meanwhile.
        """
        moment = {f"{status}_at": int(self.clock())}
        query = update(batch_table).where(batch_table.c.id == id_, batch_table.c.status.in_(tuple(expected)))
        if runner is not None:
            query = query.where(batch_table.c.runner == runner)
        async with self._database.writing() as connection:
            moved = await connection.execute(query.values(status=status, **moment, **fields))
            if moved.rowcount != 1:
                return False
            for new in files:
                await connection.execute(insert(file_table).values(asdict(new)))
        return True

    async def lease(self, id_: str, runner: str, seconds: float) -> bool:
        """Let a process run a batch for so long; False if another one does."""
        now = self.clock()
        free = or_(batch_table.c.runner.is_(None), batch_table.c.runner == runner, batch_table.c.leased_until < now)
        taken = update(batch_table).where(batch_table.c.id == id_, free)
        leased = taken.values(runner=runner, leased_until=now + seconds)
        return await self._database.change(leased, durable=False) == 1

    async def release(self, id_: str, runner: str) -> None:
        """Let any process run a batch from now on."""
        mine = update(batch_table).where(batch_table.c.id == id_, batch_table.c.runner == runner)
        await self._database.change(mine.values(runner=None, leased_until=0.0), durable=False)

    async def release_all(self, place: str) -> None:
        """The same for all batches of a place that no other process uses."""
        leased = update(batch_table).where(batch_table.c.place == place, batch_table.c.runner.is_not(None))
        await self._database.change(leased.values(runner=None, leased_until=0.0), durable=False)

    async def keep_up(self, id_: str, runner: str, seconds: float, fields: Mapping[str, Any]) -> Batch | None:
        """Save a batch's progress and prolong its lease; return its row. None: another process has the lease."""
        mine = update(batch_table).where(batch_table.c.id == id_, batch_table.c.runner == runner)
        kept = mine.values(leased_until=self.clock() + seconds, **fields).returning(batch_table)
        async with self._database.writing(durable=False) as connection:
            row = (await connection.execute(kept)).mappings().one_or_none()
        return None if row is None else Batch(**row)


def _revoked_without_successor() -> Select[Any]:
    """Keys that are revoked and whose successors all are: nobody can read their files any more."""
    dead = select(api_key.c.public_id).where(api_key.c.revoked_at.is_not(None), api_key.c.replaced_by.is_(None))
    dead_ones = dead.cte(recursive=True)
    replaced = select(api_key.c.public_id).join(dead_ones, api_key.c.replaced_by == dead_ones.c.public_id)
    return select(dead_ones.union(replaced.where(api_key.c.revoked_at.is_not(None))).c.public_id)


def _of_one_at_a_time(key: str) -> Select[Any]:
    """Lock a key's row until the transaction ends: on PostgreSQL two would else count at the same time."""
    return select(api_key.c.public_id).where(api_key.c.public_id == key).with_for_update()


def _kept(owners: Collection[str]) -> Select[Any]:
    return select(func.coalesce(func.sum(file_table.c.bytes), 0)).where(file_table.c.key_id.in_(owners))


def _page(query: Select[Any], id_: Any, *, limit: int, after: str | None, ascending: bool = False) -> Select[Any]:
    if after is not None:
        query = query.where(id_ > after if ascending else id_ < after)
    return query.order_by(id_ if ascending else id_.desc()).limit(limit)

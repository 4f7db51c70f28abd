"""The database: its URL, opening, migrating, transactions, translating the driver's errors, and writing from memory.

Knows nothing of what the tables mean, but for keys that its servers share. What SQLite and PostgreSQL do differently
is in `sqlite.py` and `postgresql.py`; the SQL above them is portable.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sqlalchemy import URL, Engine, Executable, RowMapping, Table, delete, exc, insert, make_url, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from server.store import StoreError, StoreUnavailableError
from server.store.migrations import HEAD, upgrade
from server.store.schema import bucket, secret
from server.store.sqlite import SQLITE, SqliteFile

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

    from server.store.postgresql import PostgresqlServer  # its driver need not be installed

POSTGRESQL = "postgresql+psycopg"
_FORMS = f"{SQLITE}:////var/lib/hearth/hearth.db or {POSTGRESQL}://user:password@host/database"
_LOOK_EVERY_SECONDS = 2.0
_LOOK_SECONDS = 3.0  # a slower answer counts as a failure
_LONGEST_TRANSACTION_SECONDS = 10.0
_NO_BUCKET = "-"  # is in the table of buckets for the length of a transaction
_ESCAPE = ". In a password, write @ as %40, : as %3A, / as %2F and % as %25."
_T = TypeVar("_T")
_log = logging.getLogger("hearth.store")


class Database:
    """An open database at the newest schema. Made by `open`; its opener closes it.

    `reading`, `writing` and `blocking` are transactions; they raise StoreUnavailableError when the database cannot
    answer, or when open connections no longer lead to the one that was opened. Inside `watched` they do so at once
    while it is known to fail, and none hangs for longer than 10 s.
    """

    failing: str | None = None
    """Why transactions are refused at the moment; safe to show."""

    unwritable: str | None = None
    """Why nothing can be written at the moment, though it can be read; safe to show."""

    def __init__(self, place: "SqliteFile | PostgresqlServer") -> None:
        self._place = place
        self._engine: AsyncEngine = place.engine(blocking=False)
        self._blocking_engine: Engine = place.engine(blocking=True)
        self._began: dict[object, float] = {}  # the running transactions

    @classmethod
    async def open(cls, url: str, *, busy_timeout_seconds: float = 5.0) -> Self:
        """Check what the URL leads to, bring its schema up to date, and connect.

        Safe when several processes do it at once. Raises StoreError, which says what is wrong and the remedy,
        and never the URL's password.
        """
        database = cls(_place(parse_url(url), busy_timeout_seconds))
        try:
            if await database._place.prepare(database._engine) != HEAD:
                async with database.writing() as connection:
                    await connection.run_sync(upgrade)
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def kind(self) -> str:
        return self._engine.dialect.name

    def upsert(self, table: Table) -> "sqlite.Insert | postgresql.Insert":
        """An INSERT that can become an UPDATE: both databases write ON CONFLICT alike."""
        if self.kind == "postgresql":
            from sqlalchemy.dialects import postgresql

            return postgresql.insert(table)
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)

    async def close(self) -> None:
        """Close every connection; the last one folds SQLite's log back into the file."""
        self._blocking_engine.dispose()
        await self._engine.dispose()

    async def backup(self, path: Path) -> None:
        """Write a complete copy, mode 0600, while in use. SQLite only; refuses an existing file. Raises StoreError."""
        await self._place.backup(path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A consistent view. It neither waits for a writer nor holds one up."""
        with self._checked():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, *, durable: bool = True) -> AsyncIterator[AsyncConnection]:
        """One write transaction, on disk when this returns. Waits for other writers up to busy_timeout.

        `durable=False` spares the sync: a crash of the process loses nothing, a power cut the last seconds.
        """
        with self._checked(writes=True):
            # Our own writers queue here, in order; only other processes are left for SQLite's busy polling
            async with (
                self._place.writer_turn,
                self._engine.execution_options(durable=durable).begin() as connection,
            ):
                yield connection

    async def rows(self, query: Executable) -> Sequence[RowMapping]:
        """Rows of a query, in a transaction of its own."""
        async with self.reading() as connection:
            return (await connection.execute(query)).mappings().all()

    async def first(self, query: Executable) -> RowMapping | None:
        """The first row of a query; None if there is none."""
        return next(iter(await self.rows(query)), None)

    async def change(self, statement: Executable, *, durable: bool = True) -> int:
        """Write by one statement, in a transaction of its own. Returns how many rows it has changed."""
        async with self.writing(durable=durable) as connection:
            return (await connection.execute(statement)).rowcount

    @contextmanager
    def blocking(self) -> Iterator[Any]:
        """The driver's cursor in a transaction like `writing` without the sync, for one thread: a tenth of its time."""
        with self._checked(writes=True):
            connection = self._blocking_engine.raw_connection()
            try:
                cursor = connection.cursor()
                if self._place.begin_without_sync is not None:
                    cursor.execute(self._place.begin_without_sync)
                yield cursor
                connection.commit()
            except self._place.driver_error:
                connection.invalidate()  # it may be dead, and only SQLAlchemy would have noticed
                raise
            finally:
                connection.close()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Check every 2 s whether the database answers, until the block ends."""
        tasks = SideTasks()
        tasks.every(_LOOK_EVERY_SECONDS, self._look)
        try:
            yield
        finally:
            await tasks.cancel()

    def check(self) -> None:
        """Raise StoreUnavailableError if the database is known to fail."""
        if self.failing is not None:
            raise StoreUnavailableError(self.failing, is_logged=True)

    async def _look(self) -> None:
        oldest = min(self._began.copy().values(), default=time.monotonic())
        if time.monotonic() - oldest > _LONGEST_TRANSACTION_SECONDS:
            self._place.cut_lines()
        overdue = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._place.cut_lines)
        try:
            with self._translated():
                async with self._engine.connect() as connection:
                    await self._place.look(connection)
        except StoreUnavailableError as error:
            if self.failing is None:
                _log.error("The key database fails: %s", error.message)
            self.failing = error.message
        else:
            if self.failing is not None:
                _log.warning("The key database answers again.")
            self.failing = None
            if self.unwritable is not None:
                await self._try_to_write()
        finally:
            overdue.cancel()

    async def _try_to_write(self) -> None:
        """Write a row and delete it, to find out whether the database can be written again."""
        with suppress(StoreUnavailableError):
            self._place.check_space()
            async with self.writing(durable=False) as connection:
                await connection.execute(insert(bucket).values(name=_NO_BUCKET, tat=0))
                await connection.execute(delete(bucket).where(bucket.c.name == _NO_BUCKET))
            self.unwritable = None
            _log.warning("The key database can be written again.")

    @contextmanager
    def _checked(self, *, writes: bool = False) -> Iterator[None]:
        self.check()
        transaction = object()
        self._began[transaction] = time.monotonic()
        try:
            with self._translated():
                yield
        except StoreUnavailableError as error:
            if writes:
                self._notice(error)
            raise
        finally:
            del self._began[transaction]

    def _notice(self, error: StoreUnavailableError) -> None:
        """Note and log, once, that nothing can be written; `_try_to_write` notices the end."""
        if self._place.is_unwritable(error.__cause__):
            if self.unwritable is None:
                _log.error("The key database cannot be written: %s", error.message)
            self.unwritable = error.message
            error.is_logged = True

    @contextmanager
    def _translated(self) -> Iterator[None]:
        self._place.check()
        try:
            yield
        # InvalidRequestError: two connections in a row were closed before they could be used
        except (exc.DBAPIError, exc.TimeoutError, exc.InvalidRequestError, OSError, self._place.driver_error) as error:
            cause = getattr(error, "orig", None) or error
            raise StoreUnavailableError(self._place.error_message(cause)) from cause


async def shared_key(database: Database, name: str, mine: bytes) -> bytes:
    """Return the key that all servers of this database have under this name: `mine`, for the first that asks."""
    async with database.writing() as connection:
        await connection.execute(database.upsert(secret).values(name=name, value=mine).on_conflict_do_nothing())
        return bytes((await connection.execute(select(secret.c.value).where(secret.c.name == name))).scalar_one())


def _place(url: URL, busy_timeout_seconds: float) -> "SqliteFile | PostgresqlServer":
    if url.drivername == SQLITE:
        return SqliteFile(Path(url.database or ""), busy_timeout_seconds)
    try:
        from server.store.postgresql import PostgresqlServer
    except ImportError as error:
        raise StoreError(
            "PostgreSQL needs the package psycopg and the library libpq, and one of them is missing. Install both "
            "with: .venv/bin/pip install 'psycopg[binary]'"
        ) from error
    return PostgresqlServer(url, busy_timeout_seconds)


def parse_url(text: str) -> URL:
    """A URL of one of the two kinds, complete. Raises StoreError, which repeats neither password nor text."""
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):
        # Without the cause: the text of a port that is not a number may be part of a password
        raise StoreError(f"The database URL cannot be read. Write it like {_FORMS}{_ESCAPE}") from None
    server = f"{POSTGRESQL}://user:password@host/database"
    if url.drivername == SQLITE:
        if not url.database or url.database == ":memory:" or url.query:
            raise StoreError(
                f"The database must be one file, without options: {SQLITE}:////path/to/hearth.db. "
                "A database in memory would forget every key."
            )
    elif url.drivername != POSTGRESQL:
        raise StoreError(f"Databases of kind {url.drivername[:32]!r} are not supported. Use {_FORMS}")
    # Behind an unescaped @ the rest of a password would be taken for the host, and be shown as such
    elif "@" in (url.host or "") + (url.database or ""):
        raise StoreError(f"The database URL has more than one @. Write it like {server}{_ESCAPE}")
    elif not url.database:
        raise StoreError(f"The database URL names no database. Write it like {server}")
    return url


class SideTasks:
    """Tasks that outlive the request that began them. asyncio itself keeps no reference to a task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin `work`. Its result, or its error, is the task's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` again and again, with a pause before each time, until `cancel`. Errors are logged."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await work()
                except Exception:  # noqa: BLE001  # the next time may go well
                    _log.exception("what is done every %s seconds has failed", seconds)

        self.start(repeat())

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not warn of it


class WrittenLater:
    """Data in memory that `flush` writes, again and again and at the end. Use as `async with`."""

    flush_every_seconds: float
    _is_logged = False  # that it cannot be written

    @cached_property
    def tasks(self) -> SideTasks:
        return SideTasks()

    async def flush(self) -> None:
        """Write everything. Raises StoreUnavailableError, and what was to be written is kept."""
        raise NotImplementedError

    def unwritten(self) -> str | None:
        """The beginning of a log line that ends in "not written yet"; None if none is needed."""
        return None

    async def __aenter__(self) -> Self:
        self.tasks.every(self.flush_every_seconds, self._try_to_flush)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and write what is left. A failing store does not hold up the shutdown for long."""
        await self.tasks.cancel()
        await self._try_to_flush(last=True)

    async def _try_to_flush(self, *, last: bool = False) -> None:
        try:
            await self.flush()
            self._is_logged = False
        except StoreUnavailableError as error:
            if (what := self.unwritten()) and (last or not (self._is_logged or error.is_logged)):
                _log.warning("%s not written yet: %s", what, error.message)
            self._is_logged = True

"""The database connection: opening, migrating, transactions, and translating the driver's errors.

Knows nothing of what the tables mean. SQLite only for now; the SQL above it is portable Core.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import URL, event, exc, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from server.store import migrations, sqlite_file
from server.store.errors import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from sqlalchemy import Connection

_DRIVER = "sqlite+aiosqlite"
_READERS = 4  # each is a thread; a key lookup takes well under a millisecond
FILE_NAME = "hearth.db"


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file; of `hearth.db` in it when `path` is a directory."""
    file = path / FILE_NAME if path.is_dir() else path
    return URL.create(_DRIVER, database=str(file.absolute())).render_as_string(hide_password=False)


class Database:
    """An open database at the newest schema. Made by `open`; whoever opens it closes it.

    `reading` and `writing` are transactions; both raise StoreUnavailableError when the database
    cannot answer.
    """

    def __init__(self, engine: AsyncEngine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._identity = sqlite_file.identity(path)
        self._writer_turn = asyncio.Lock()

    @classmethod
    async def open(cls, url: str, *, busy_timeout_seconds: float = 5.0) -> Self:
        """Check the file, bring its schema up to date, and connect.

        Safe when several processes do it at once. Raises StoreError, which says what is wrong and the remedy.
        """
        path = _file_in(url)
        version = await asyncio.to_thread(sqlite_file.prepare, path, busy_timeout_seconds=busy_timeout_seconds)
        database = cls(_engine(path, busy_timeout_seconds), path)
        if version != migrations.HEAD:
            try:
                async with database.writing() as connection:
                    await connection.run_sync(migrations.upgrade)
            except BaseException:
                await database.close()
                raise
        return database

    async def close(self) -> None:
        """Close every connection; the last one folds SQLite's log back into the file."""
        await self._engine.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A consistent view. In WAL mode it neither waits for a writer nor holds one up."""
        with _translated():
            self._refuse_another_file()
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """One write transaction, on disk when this returns. Waits for other writers up to busy_timeout."""
        with _translated():
            self._refuse_another_file()
            # Our own writers queue here, in order; only other processes are left for SQLite's busy polling
            async with self._writer_turn, self._engine.connect() as connection:
                await connection.execution_options(sqlite_begin="BEGIN IMMEDIATE")
                async with connection.begin():
                    yield connection

    def _refuse_another_file(self) -> None:
        # Open connections would go on with the deleted file, where no revocation ever arrives
        try:
            same = sqlite_file.identity(self._path) == self._identity
        except OSError:
            same = False
        if not same:
            raise StoreUnavailableError(
                "The key database was removed or replaced while the server was running. Restart the server."
            )


def _file_in(url: str) -> Path:
    try:
        parsed = make_url(url)
    except exc.ArgumentError as error:
        raise StoreError(
            "The database URL cannot be read. Write it like sqlite+aiosqlite:////var/lib/hearth/hearth.db"
        ) from error
    if parsed.drivername != _DRIVER:
        raise StoreError(
            f"Databases of kind {parsed.drivername!r} are not supported; use {_DRIVER}:////path/to/hearth.db"
        )
    if not parsed.database or parsed.database == ":memory:" or parsed.query:
        raise StoreError(
            f"The database must be one file, without options: {_DRIVER}:////path/to/hearth.db. "
            f"A database in memory would forget every key."
        )
    return Path(parsed.database)


def _engine(path: Path, busy_timeout_seconds: float) -> AsyncEngine:
    # mode=rw: a file that vanished must be an error, never a fresh empty database
    url = URL.create(_DRIVER, database=path.absolute().as_uri(), query={"mode": "rw", "uri": "true"})
    engine = create_async_engine(
        url,
        connect_args={"timeout": busy_timeout_seconds, "isolation_level": None},
        hide_parameters=True,  # errors must not carry hashes
        pool_size=_READERS + 1,
        max_overflow=0,
        pool_timeout=busy_timeout_seconds,
    )
    event.listen(engine.sync_engine, "connect", _set_up)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _set_up(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    # A key is shown once, after its commit. With NORMAL, WAL commits reach the disk only at a checkpoint,
    # and a power cut would take back a key somebody already holds, or a revocation. FULL costs one fsync per
    # commit.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _begin(connection: Connection) -> None:
    # The driver is in autocommit (isolation_level None): left alone it would begin late, and a transaction
    # that reads before it writes would fail at once instead of waiting for its turn
    connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError, OSError) as error:
        cause = getattr(error, "orig", None)
        if "SQLITE_BUSY" in getattr(cause, "sqlite_errorname", ""):
            message = "The key database is locked by another program. Try again in a few seconds."
        else:
            message = (
                "The key database cannot be read or written right now. Try again in a few seconds; if it "
                "stays so, check that the disk is not full, and restart the server, which checks the "
                "database."
            )
        raise StoreUnavailableError(message) from error

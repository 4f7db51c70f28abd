"""The database: its URL, opening, migrating, transactions, and translating the driver's errors.

Knows nothing of what the tables mean. What SQLite and PostgreSQL do differently is in `sqlite.py` and `postgresql.py`;
the SQL above them is portable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sqlalchemy import URL, Connection, Engine, exc, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from server.store.migrations import HEAD, upgrade
from server.store.schema import StoreError, StoreUnavailableError
from server.store.sqlite import SQLITE, SqliteFile

if TYPE_CHECKING:
    from server.store.postgresql import PostgresqlServer  # its driver need not be installed

POSTGRESQL = "postgresql+psycopg"
_FORMS = f"{SQLITE}:////var/lib/hearth/hearth.db or {POSTGRESQL}://user:password@host/database"
_ESCAPE = ". In a password, write @ as %40, : as %3A, / as %2F and % as %25."


class Database:
    """An open database at the newest schema. Made by `open`; whoever opens it closes it.

    `reading`, `writing` and `blocking` are transactions; they raise StoreUnavailableError when the database cannot
    answer, or when open connections no longer lead to the one that was opened.
    """

    def __init__(self, place: SqliteFile | PostgresqlServer) -> None:
        self._place = place
        self._engine: AsyncEngine = place.engine(blocking=False)
        self._blocking_engine: Engine = place.engine(blocking=True).execution_options(durable=False)

    @classmethod
    async def open(cls, url: str, *, busy_timeout_seconds: float = 5.0) -> Self:
        """Judge what the URL leads to, bring its schema up to date, and connect.

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
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    async def close(self) -> None:
        """Close every connection; the last one folds SQLite's log back into the file."""
        self._blocking_engine.dispose()
        await self._engine.dispose()

    async def backup(self, path: Path) -> None:
        """Write a complete copy, mode 0600, while everything goes on. SQLite only; refuses an existing file.

        Raises StoreError.
        """
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
        with self._checked():
            # Our own writers queue here, in order; only other processes are left for SQLite's busy polling
            async with (
                self._place.writer_turn,
                self._engine.execution_options(durable=durable).begin() as connection,
            ):
                yield connection

    @contextmanager
    def blocking(self) -> Iterator[Connection]:
        """Like `writing` without the sync, for one thread: a quarter of the time of the asynchronous layers."""
        with self._checked(), self._blocking_engine.begin() as connection:
            yield connection

    @contextmanager
    def _checked(self) -> Iterator[None]:
        self._place.check()
        try:
            yield
        except (exc.DBAPIError, exc.TimeoutError, OSError) as error:
            raise StoreUnavailableError(self._place.error_message(getattr(error, "orig", None) or error)) from error


def _place(url: URL, busy_timeout_seconds: float) -> SqliteFile | PostgresqlServer:
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
        # Without the cause: the text of a port that is no number may be half a password
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

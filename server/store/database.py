"""The database: its URL, opening, migrating, transactions, and translating the driver's errors.

Knows nothing of what the tables mean. What SQLite and PostgreSQL do differently is in `sqlite.py` and `postgresql.py`;
the SQL above them is portable Core.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import URL, exc, make_url
from sqlalchemy.ext.asyncio import AsyncConnection

from server.store.errors import StoreError, StoreUnavailableError
from server.store.migrations import HEAD, upgrade
from server.store.sqlite import SQLITE, SqliteConnections

if TYPE_CHECKING:
    from server.store.postgresql import PostgresqlConnections  # its driver need not be installed

POSTGRESQL = "postgresql+psycopg"
_FORMS = f"{SQLITE}:////var/lib/hearth/hearth.db or {POSTGRESQL}://user:password@host/database"
_ESCAPE = ". In a password, write @ as %40, : as %3A, / as %2F and % as %25."


class Database:
    """An open database at the newest schema. Made by `open`; whoever opens it closes it.

    `reading` and `writing` are transactions; both raise StoreUnavailableError when the database
    cannot answer.
    """

    def __init__(self, connections: SqliteConnections | PostgresqlConnections) -> None:
        self._connections = connections

    @classmethod
    async def open(cls, url: str, *, busy_timeout_seconds: float = 5.0) -> Self:
        """Judge what the URL leads to, bring its schema up to date, and connect.

        Safe when several processes do it at once. Raises StoreError, which says what is wrong and the remedy,
        and never the URL's password.
        """
        connections = _connections(url, busy_timeout_seconds)
        database = cls(connections)
        try:
            if await connections.prepare() != HEAD:
                await database._upgrade()
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def kind(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._connections.kind

    async def close(self) -> None:
        """Close every connection; the last one folds SQLite's log back into the file."""
        await self._connections.close()

    async def backup(self, path: Path) -> None:
        """Write a complete copy, mode 0600, while everything goes on. SQLite only; refuses an existing file.

        Raises StoreError.
        """
        await self._connections.backup(path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A consistent view. It neither waits for a writer nor holds one up."""
        with self.translated():
            async with self._connections.reading() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, *, durable: bool = True) -> AsyncIterator[AsyncConnection]:
        """One write transaction, on disk when this returns. Waits for other writers up to busy_timeout.

        `durable=False` spares the sync: a crash of the process loses nothing, a power cut the last seconds.
        """
        with self.translated():
            async with self._connections.writing(durable=durable) as connection:
                yield connection

    def check(self) -> None:
        """Raise StoreUnavailableError when open connections no longer lead to the database that was opened."""
        self._connections.check()

    def blocking_connection(self) -> Any:
        """A DB-API connection for one thread, in autocommit, without the sync of commits. Blocks.

        Whoever asks closes it, and works within `check` and `translated`.
        """
        return self._connections.blocking_connection()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn the driver's errors into StoreUnavailableError."""
        kinds: tuple[type[Exception], ...] = (exc.DBAPIError, exc.TimeoutError, OSError)
        try:
            yield
        except kinds + self._connections.driver_errors as error:
            cause = getattr(error, "orig", None) or error
            raise StoreUnavailableError(self._connections.error_message(cause)) from error

    async def _upgrade(self) -> None:
        try:
            async with self.writing() as connection:
                await connection.run_sync(upgrade)
        except StoreUnavailableError as error:
            cause = error.__cause__
            denied = self._connections.permission_error(getattr(cause, "orig", None) or cause or error)
            if denied is None:
                raise
            raise denied from cause


def _connections(url: str, busy_timeout_seconds: float) -> SqliteConnections | PostgresqlConnections:
    parsed = parse_url(url)
    if parsed.drivername == SQLITE:
        return SqliteConnections(Path(parsed.database or ""), busy_timeout_seconds)
    try:
        from server.store.postgresql import PostgresqlConnections
    except ImportError as error:
        raise StoreError(
            "PostgreSQL needs the package psycopg and the library libpq, and one of them is missing. Install both "
            "with: .venv/bin/pip install 'psycopg[binary]'"
        ) from error
    return PostgresqlConnections(parsed, busy_timeout_seconds)


def parse_url(text: str) -> URL:
    """A URL of one of the two kinds, complete. Raises StoreError, which repeats neither password nor text."""
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):
        # Without the cause: the text of a port that is no number may be half a password
        raise StoreError(f"The database URL cannot be read. Write it like {_FORMS}{_ESCAPE}") from None
    if url.drivername == SQLITE:
        _check_file(url)
    elif url.drivername == POSTGRESQL:
        _check_server(url)
    else:
        raise StoreError(f"Databases of kind {url.drivername[:32]!r} are not supported. Use {_FORMS}")
    return url


def _check_file(url: URL) -> None:
    if not url.database or url.database == ":memory:" or url.query:
        raise StoreError(
            f"The database must be one file, without options: {SQLITE}:////path/to/hearth.db. "
            "A database in memory would forget every key."
        )


def _check_server(url: URL) -> None:
    # Behind an unescaped @ the rest of a password would be taken for the host, and be shown as such
    if "@" in (url.host or "") + (url.database or ""):
        raise StoreError(
            f"The database URL has more than one @. Write it like {POSTGRESQL}://user:password@host/db{_ESCAPE}"
        )
    if not url.database:
        raise StoreError(
            f"The database URL names no database. Write it like {POSTGRESQL}://user:password@host/database"
        )

"""The database: its URL, opening, migrating, transactions, and translating the driver's errors.

Knows nothing of what the tables mean. What SQLite and PostgreSQL do differently is in `sqlite.py` and `postgresql.py`;
the SQL above them is portable Core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from sqlalchemy import URL, exc, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from server.store.errors import StoreError, StoreUnavailableError
from server.store.migrations import HEAD, upgrade
from server.store.sqlite import SQLITE, SqliteConnections

POSTGRESQL = "postgresql+psycopg"
_FORMS = f"{SQLITE}:////var/lib/hearth/hearth.db or {POSTGRESQL}://user:password@host/database"
_ESCAPE = ". In a password, write @ as %40, : as %3A, / as %2F and % as %25."


class Connections(Protocol):
    """One kind of database. Three engines: for reading, for what must never be lost, and for counters."""

    kind: str
    one_writer: bool
    driver_errors: tuple[type[Exception], ...]
    reader: AsyncEngine
    durable: AsyncEngine
    quick: AsyncEngine

    async def prepare(self) -> str | None:
        """Judge the database; its schema's version, None where it is empty. Raises StoreError."""

    def check(self) -> None:
        """Raise StoreUnavailableError when open connections no longer lead to what was judged."""

    def plain(self) -> Any:
        """A quick DB-API connection in autocommit, for one thread, which closes it. Blocks."""

    def explained(self, error: BaseException) -> str:
        """What a driver's error means to whoever sends requests; names no host, file or password."""

    def refused(self, error: BaseException) -> StoreError | None:
        """What an error while the tables are made means to the operator, where waiting would not help."""

    async def backup(self, path: Path) -> None: ...

    async def close(self) -> None: ...


class Database:
    """An open database at the newest schema. Made by `open`; whoever opens it closes it.

    `reading` and `writing` are transactions; both raise StoreUnavailableError when the database
    cannot answer.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._writer_turn = asyncio.Lock()

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
        self._connections.check()
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
            self._connections.check()
            async with self._connections.reader.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, *, durable: bool = True) -> AsyncIterator[AsyncConnection]:
        """One write transaction, on disk when this returns. Waits for other writers up to busy_timeout.

        `durable=False` spares the sync: a crash of the process loses nothing, a power cut the last seconds.
        """
        engine = self._connections.durable if durable else self._connections.quick
        with self.translated():
            self._connections.check()
            if not self._connections.one_writer:
                async with engine.begin() as connection:
                    yield connection
                return
            # Our own writers queue here, in order; only other processes are left for SQLite's busy polling
            async with self._writer_turn, engine.connect() as connection:
                await connection.execution_options(sqlite_begin="BEGIN IMMEDIATE")
                async with connection.begin():
                    yield connection

    def check(self) -> None:
        """Raise StoreUnavailableError when open connections no longer lead to the database that was opened."""
        self._connections.check()

    def plain(self) -> Any:
        """A DB-API connection for one thread, in autocommit, without the sync of commits. Blocks.

        Whoever asks closes it, and works within `check` and `translated`.
        """
        return self._connections.plain()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn the driver's errors into StoreUnavailableError."""
        kinds: tuple[type[Exception], ...] = (exc.DBAPIError, exc.TimeoutError, OSError)
        try:
            yield
        except kinds + self._connections.driver_errors as error:
            cause = getattr(error, "orig", None) or error
            raise StoreUnavailableError(self._connections.explained(cause)) from error

    async def _upgrade(self) -> None:
        try:
            async with self.writing() as connection:
                await connection.run_sync(upgrade)
        except StoreUnavailableError as error:
            cause = error.__cause__
            refused = self._connections.refused(getattr(cause, "orig", None) or cause or error)
            if refused is None:
                raise
            raise refused from cause


def _connections(url: str, busy_timeout_seconds: float) -> Connections:
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

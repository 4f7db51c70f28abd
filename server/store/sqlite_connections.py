"""Connections to a SQLite file: pragmas, transactions, backup, and what its errors mean while running.

Judging the file before use is `sqlite_file.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import create_async_engine

from server.store import sqlite_file
from server.store.database_url import SQLITE
from server.store.errors import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

_READERS = 4  # each is a thread; a key lookup takes well under a millisecond


class SqliteConnections:
    """Engines on one file that `prepare` has judged. See `database.Connections` for what each member promises."""

    kind = "sqlite"
    one_writer = True
    driver_errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: Path, busy_timeout_seconds: float) -> None:
        self._path = path
        self._busy_timeout_seconds = busy_timeout_seconds
        self._identity: tuple[int, int] | None = None
        # A key is shown once, after its commit. With NORMAL, WAL commits reach the disk only at a checkpoint,
        # and a power cut would take back a key somebody already holds, or a revocation. FULL costs one fsync
        # per commit, which counters of limits and usage are not worth.
        self.durable = self._engine("FULL", _READERS + 1)
        self.quick = self._engine("NORMAL", 1)
        self.reader = self.durable

    async def prepare(self) -> str | None:
        version = await asyncio.to_thread(
            sqlite_file.prepare, self._path, busy_timeout_seconds=self._busy_timeout_seconds
        )
        self._identity = sqlite_file.identity(self._path)
        return version

    def check(self) -> None:
        # Open connections would go on with the deleted file, where no revocation ever arrives
        try:
            same = sqlite_file.identity(self._path) == self._identity
        except OSError:
            same = False
        if not same:
            raise StoreUnavailableError(
                "The key database was removed or replaced while the server was running. Restart the server."
            )

    def plain(self) -> Any:
        connection = sqlite3.connect(self._uri, uri=True, timeout=self._busy_timeout_seconds, isolation_level=None)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def explained(self, error: BaseException) -> str:
        if "SQLITE_BUSY" in getattr(error, "sqlite_errorname", ""):
            return "The key database is locked by another program. Try again in a few seconds."
        return (
            "The key database cannot be read or written right now. Try again in a few seconds; if it stays so, "
            "check that the disk is not full, and restart the server, which checks the database."
        )

    def refused(self, error: BaseException) -> StoreError | None:
        del error  # `prepare` has explained already what is wrong with a file
        return None

    async def backup(self, path: Path) -> None:
        await asyncio.to_thread(self._backup, path)

    async def close(self) -> None:
        await self.quick.dispose()
        await self.durable.dispose()

    def _backup(self, path: Path) -> None:
        # SQLite fills an empty file, so its mode is right before the first hash is in it
        try:
            copy = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise StoreError(
                f"The backup {path} cannot be made: {error.strerror}. Name a file that does not exist yet, in a "
                "folder that exists."
            ) from error
        try:
            with closing(self.plain()) as connection:
                connection.execute("VACUUM INTO ?", (str(path.absolute()),))
            os.fsync(copy)
        except (sqlite3.Error, OSError) as error:
            path.unlink(missing_ok=True)
            raise StoreError(f"The backup {path} failed: {error}. Is the disk full? Nothing was left there.") from error
        finally:
            os.close(copy)

    @property
    def _uri(self) -> str:
        # mode=rw: a file that vanished must be an error, never a fresh empty database
        return f"{self._path.absolute().as_uri()}?mode=rw"

    def _engine(self, synchronous: str, size: int) -> AsyncEngine:
        url = URL.create(SQLITE, database=self._path.absolute().as_uri(), query={"mode": "rw", "uri": "true"})
        engine = create_async_engine(
            url,
            connect_args={"timeout": self._busy_timeout_seconds, "isolation_level": None},
            hide_parameters=True,  # errors must not carry hashes
            pool_size=size,
            max_overflow=0,
            pool_timeout=self._busy_timeout_seconds,
        )
        event.listen(engine.sync_engine, "connect", _set_up(synchronous))
        event.listen(engine.sync_engine, "begin", _begin)
        return engine


def _set_up(synchronous: str) -> Callable[[Any, object], None]:
    def on_connect(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute(f"PRAGMA synchronous = {synchronous}")
        cursor.close()

    return on_connect


def _begin(connection: Connection) -> None:
    # The driver is in autocommit (isolation_level None): left alone it would begin late, and a transaction
    # that reads before it writes would fail at once instead of waiting for its turn
    connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))

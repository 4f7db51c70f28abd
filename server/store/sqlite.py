"""A database in one SQLite file: making and judging it before use, WAL mode, its connections, what its errors mean.

Judging blocks and runs in a thread when the store opens. Nothing here writes to a file it has not judged sound and
ours; a damaged one is left exactly as it is for its owner to restore.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from server.store.backup import back_up
from server.store.errors import StoreError, StoreUnavailableError
from server.store.migrations import HEAD, VERSION_TABLE, is_known

SQLITE = "sqlite+aiosqlite"
FILE_NAME = "hearth.db"
_READERS = 4  # each is a thread; a key lookup takes well under a millisecond
_REMEDY = (
    "Hearth has not changed it. Stop the server, move the file (and those ending in -wal and -shm) aside, "
    "and put a backup in its place; without a backup, start anew and create new keys. See docs/keys.md, "
    "'When the database is damaged'."
)


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file; of `hearth.db` in it when `path` is a directory."""
    file = path / FILE_NAME if path.is_dir() else path
    return URL.create(SQLITE, database=str(file.absolute())).render_as_string(hide_password=False)


class SqliteConnections:
    """Connections to one file that `prepare` has judged; what `database.Database` has too is described there."""

    kind = "sqlite"
    driver_errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: Path, busy_timeout_seconds: float) -> None:
        self._path = path
        self._busy_timeout_seconds = busy_timeout_seconds
        self._identity: tuple[int, int] | None = None
        self._engine = self._made_engine()
        self._writer_turn = asyncio.Lock()

    async def prepare(self) -> str | None:
        """Judge the database, return its schema version (None: it is empty). Raises StoreError."""
        version = await asyncio.to_thread(prepare, self._path, busy_timeout_seconds=self._busy_timeout_seconds)
        self._identity = _identity_of(self._path)
        return version

    def reading(self) -> AsyncConnection:
        self.check()
        return self._engine.connect()

    @asynccontextmanager
    async def writing(self, *, durable: bool) -> AsyncIterator[AsyncConnection]:
        self.check()
        # A key is shown once, after its commit. With NORMAL, WAL commits reach the disk only at a checkpoint,
        # and a power cut would take back a key somebody already holds, or a revocation. FULL costs one fsync
        # per commit, which counters of limits and usage are not worth.
        synchronous = "FULL" if durable else "NORMAL"
        # Our own writers queue here, in order; only other processes are left for SQLite's busy polling
        async with self._writer_turn, self._engine.connect() as connection:
            await connection.execution_options(synchronous=synchronous)
            async with connection.begin():
                yield connection

    def blocking_connection(self) -> Any:
        uri = f"{self._path.absolute().as_uri()}?mode=rw"  # a file that vanished must be an error
        connection = sqlite3.connect(uri, uri=True, timeout=self._busy_timeout_seconds, isolation_level=None)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def check(self) -> None:
        # Open connections would go on with the deleted file, where no revocation ever arrives
        try:
            same = _identity_of(self._path) == self._identity
        except OSError:
            same = False
        if not same:
            raise StoreUnavailableError(
                "The key database was removed or replaced while the server was running. Restart the server."
            )

    def error_message(self, error: BaseException) -> str:
        """Return what a caller is told about an error of the driver."""
        if "SQLITE_BUSY" in getattr(error, "sqlite_errorname", ""):
            return "The key database is locked by another program. Try again in a few seconds."
        return (
            "The key database cannot be read or written right now. Try again in a few seconds; if it stays so, "
            "check that the disk is not full, and restart the server, which checks the database."
        )

    def permission_error(self, error: BaseException) -> StoreError | None:
        """Return the error for an upgrade that was not permitted; None: it failed for another reason."""
        del error  # `prepare` has explained already what is wrong with a file
        return None

    async def backup(self, path: Path) -> None:
        self.check()
        await asyncio.to_thread(back_up, self._path, path)

    async def close(self) -> None:
        await self._engine.dispose()

    def _made_engine(self) -> AsyncEngine:
        # mode=rw: a file that vanished must be an error, never a fresh empty database
        url = URL.create(SQLITE, database=self._path.absolute().as_uri(), query={"mode": "rw", "uri": "true"})
        engine = create_async_engine(
            url,
            connect_args={"timeout": self._busy_timeout_seconds, "isolation_level": None},
            hide_parameters=True,  # errors must not carry hashes
            pool_size=_READERS + 1,
            max_overflow=0,
            pool_timeout=self._busy_timeout_seconds,
        )
        event.listen(engine.sync_engine, "connect", _set_up)
        event.listen(engine.sync_engine, "begin", _begin)
        return engine


def _set_up(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _begin(connection: Connection) -> None:
    # The driver is in autocommit (isolation_level None): left alone it would begin late, and a transaction
    # that reads before it writes would fail at once instead of waiting for its turn
    synchronous = connection.get_execution_options().get("synchronous")
    if synchronous is None:
        connection.exec_driver_sql("BEGIN")
        return
    if connection.info.get("synchronous", "FULL") != synchronous:
        connection.exec_driver_sql(f"PRAGMA synchronous = {synchronous}")
        connection.info["synchronous"] = synchronous
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def prepare(path: Path, *, busy_timeout_seconds: float) -> str | None:
    """Make the file if there is none, judge it, switch it to WAL; returns its schema version, None if empty.

    Raises StoreError, with the remedy, for a file that is damaged, foreign, too new or unreachable.
    """
    try:
        _create(path)
        version = _judge(path, busy_timeout_seconds)
        _switch_to_wal(path, busy_timeout_seconds)
    except sqlite3.Error as error:
        raise _explained(path, error) from error
    except OSError as error:
        raise StoreError(
            f"The key database {path} cannot be reached: {error.strerror}. Check that the data directory "
            "exists on a local disk and belongs to the user that runs Hearth."
        ) from error
    return version


def _identity_of(path: Path) -> tuple[int, int]:
    """Tells whether a path still names the file it named before. Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _create(path: Path) -> None:
    # Asked in this order, because another process may be making both right now
    log = path.with_name(path.name + "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    if path.exists():
        return
    if has_log:
        raise StoreError(
            f"The key database {path} is gone, but its log {log.name} is still there, so it was moved or "
            f"deleted. Put {path.name} back beside its log, or restore a backup. To start anew without the "
            f"old keys, move {log.name} aside."
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its -wal and -shm files the mode of the database
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _judge(path: Path, busy_timeout_seconds: float) -> str | None:
    with closing(_connect(path, "ro", busy_timeout_seconds)) as connection:
        problems = [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]
        if problems != ["ok"]:
            raise StoreError(f"The key database {path} is damaged (SQLite: {problems[0]}). {_REMEDY}")
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            return None
        if VERSION_TABLE not in tables:
            raise StoreError(
                f"{path} is a database of another program: it has tables, but none named {VERSION_TABLE}. "
                "Hearth has not changed it. Point the data directory somewhere else, or move that file "
                "away."
            )
        row = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()  # noqa: S608 - our constant
    return _known(path, str(row[0])) if row else None


def _known(path: Path, version: str) -> str:
    if is_known(version):
        return version
    raise StoreError(
        f"The key database {path} has schema {version[:32]!r}; this release of Hearth knows schemas up to "
        f"{HEAD}. A newer release has used it. Run that release again, or restore the backup made before "
        "the upgrade (see docs/keys.md). Hearth has not changed the file."
    )


def _switch_to_wal(path: Path, busy_timeout_seconds: float) -> None:
    """WAL lets requests read keys while somebody writes. The file remembers it, so this happens once."""
    deadline = time.monotonic() + busy_timeout_seconds
    with closing(_connect(path, "rw", busy_timeout_seconds)) as connection:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            return
        while True:
            try:
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            except sqlite3.OperationalError as error:
                # SQLite does not wait here when two processes make the switch at once
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                break
    if mode != "wal":
        raise StoreError(
            f"The file system of {path} does not allow SQLite's write-ahead log. Use a local disk, not a network share."
        )


def _connect(path: Path, mode: str, busy_timeout_seconds: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=busy_timeout_seconds,
        isolation_level=None,
    )


def _explained(path: Path, error: sqlite3.Error) -> StoreError:
    name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    if name == "SQLITE_NOTADB":
        return StoreError(f"{path} is not a SQLite database, or its first page is overwritten. {_REMEDY}")
    if name.startswith("SQLITE_CORRUPT"):
        return StoreError(f"The key database {path} is damaged (SQLite: {error}). {_REMEDY}")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreError(
            f"The key database {path} is locked by another program. Close what holds it (`fuser {path}` "
            "names it) and start again."
        )
    return StoreError(
        f"The key database {path} cannot be opened (SQLite: {error}, {name}). Check that file and directory "
        "belong to the user that runs Hearth, that the disk is not full and that the path is a file on a "
        "local disk."
    )

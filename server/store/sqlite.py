"""A database in one SQLite file: making and checking it before use, its connections, its copies, what its errors mean.

The check blocks and runs in a thread when the store opens. Nothing here writes to a file before it is found sound and
ours; a damaged one is left exactly as it is for its owner to restore. SQLAlchemy is imported only where it is needed:
`hearth doctor` checks without it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.files import sync_folder
from server.store import StoreError, StoreUnavailableError
from server.store.migrations import HEAD, VERSION_TABLE, is_known, known_version

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

SQLITE = "sqlite+aiosqlite"
FILE_NAME = "hearth.db"
_SUFFIXES = ("", "-wal", "-shm")  # the database first: a log without its database is refused by every start
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table'"
_VERSION = f"SELECT version_num FROM {VERSION_TABLE}"  # noqa: S608 - our constant
_SPARE_BYTES = 256 << 10
_UNWRITABLE_ERRORS = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR")
_UNWRITABLE = "The disk of the key database is full or cannot be written. Free space there; all goes on by itself then."
_REMEDY = (
    "Hearth has not changed it. Stop the server, move the file (and those ending in -wal and -shm) aside, "
    "and put a backup in its place; without a backup, start over and create new keys. See docs/keys.md, "
    "'When the database is damaged'."
)


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file; of `hearth.db` in it when `path` is a directory."""
    from sqlalchemy import URL

    file = path / FILE_NAME if path.is_dir() else path
    return URL.create(SQLITE, database=str(file.absolute())).render_as_string(hide_password=False)


class SqliteFile:
    """One file. What `postgresql.PostgresqlServer` has too is described in `database.Database`."""

    driver_error = sqlite3.Error
    begin_without_sync = "BEGIN IMMEDIATE"

    def __init__(self, path: Path, busy_timeout_seconds: float) -> None:
        self._path = path
        self._busy_timeout_seconds = busy_timeout_seconds
        self._identity: tuple[int, int] | None = None
        self.writer_turn = asyncio.Lock()

    def engine(self, *, blocking: bool) -> Any:
        from sqlalchemy import URL, create_engine, event
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = (create_engine if blocking else create_async_engine)(
            # mode=rw: a file that vanished must be an error, never a fresh empty database
            URL.create(
                "sqlite+pysqlite" if blocking else SQLITE,
                database=self._path.absolute().as_uri(),
                query={"mode": "rw", "uri": "true"},
            ),
            connect_args={"timeout": self._busy_timeout_seconds, "isolation_level": None},
            hide_parameters=True,  # errors must not carry hashes
            pool_size=1 if blocking else 5,  # each is a thread; a key lookup takes well under a millisecond
            max_overflow=0,
            pool_timeout=self._busy_timeout_seconds,
        )

        def set_up(connection: Any, _record: object) -> None:
            with closing(connection.cursor()) as cursor:
                cursor.execute("PRAGMA foreign_keys = ON")
                cursor.execute(f"PRAGMA synchronous = {'NORMAL' if blocking else 'FULL'}")

        plain = getattr(engine, "sync_engine", engine)
        event.listen(plain, "connect", set_up)
        event.listen(plain, "begin", _begin)
        return engine

    async def prepare(self, _engine: AsyncEngine) -> str | None:
        version = await asyncio.to_thread(prepare, self._path, busy_timeout_seconds=self._busy_timeout_seconds)
        self._identity = _identity_of(self._path)
        return version

    def check(self) -> None:
        # Open connections would go on with the deleted file, where no revocation ever arrives
        with suppress(OSError):
            if _identity_of(self._path) == self._identity:
                return
        raise StoreUnavailableError(
            "The key database was removed or replaced while the server was running. Restart the server."
        )

    async def look(self, connection: AsyncConnection) -> None:
        """Raise an error unless it can be read."""
        await connection.exec_driver_sql(_VERSION)

    def check_space(self) -> None:
        """Raise StoreUnavailableError while the disk has no room for more than a few pages."""
        with suppress(OSError):
            if shutil.disk_usage(self._path.parent).free < _SPARE_BYTES:
                raise StoreUnavailableError(_UNWRITABLE)

    def cut_lines(self) -> None:
        """Nothing to do: the busy timeout ends every wait."""

    def error_message(self, error: BaseException) -> str:
        if "SQLITE_BUSY" in getattr(error, "sqlite_errorname", ""):
            return "The key database is locked by another program. Try again in a few seconds."
        if self.is_unwritable(error):
            return _UNWRITABLE
        return (
            "The key database cannot be read or written right now. Try again in a few seconds; if it stays so, "
            "check that the disk is not full, and restart the server, which checks the database."
        )

    def is_unwritable(self, error: BaseException | None) -> bool:
        """Whether the database can be read, but not written."""
        return getattr(error, "sqlite_errorname", "").startswith(_UNWRITABLE_ERRORS)

    async def backup(self, path: Path) -> None:
        self.check()
        await asyncio.to_thread(_back_up, self._path, path)


def _begin(connection: Connection) -> None:
    # The driver is in autocommit (isolation_level None): left alone it would begin late, and a transaction
    # that reads before it writes would fail at once instead of waiting for its turn
    durable = connection.get_execution_options().get("durable")
    if durable is None:
        connection.exec_driver_sql("BEGIN")
        return
    # A key is shown once, after its commit. With NORMAL, WAL commits reach the disk only at a checkpoint,
    # and a power cut would take back a key somebody already holds, or a revocation. FULL costs one fsync
    # per commit, which counters of limits and usage are not worth.
    if connection.info.get("durable", True) != durable:
        connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.info["durable"] = durable
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def prepare(path: Path, *, busy_timeout_seconds: float) -> str | None:
    """Make the file if there is none, check it, switch it to WAL; returns its schema version, None if empty.

    Raises StoreError, with the remedy, for a file that is damaged, foreign, too new or unreachable.
    """
    try:
        _create(path)
        with _connected(path, "ro", busy_timeout_seconds) as connection:
            problems = [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]
            if problems != ["ok"]:
                raise StoreError(f"The key database {path} is damaged (SQLite: {problems[0]}). {_REMEDY}")
            tables = {row[0] for row in connection.execute(_TABLES)}
            row = connection.execute(_VERSION).fetchone() if VERSION_TABLE in tables else None
            version = known_version(str(path), tables, row and str(row[0]))
        with _connected(path, "rw", busy_timeout_seconds) as connection:
            _switch_to_wal(path, connection, time.monotonic() + busy_timeout_seconds)
    except sqlite3.Error as error:
        raise _explained(path, error) from error
    except OSError as error:
        raise StoreError(
            f"The key database {path} cannot be reached: {error.strerror}. Check that the data directory "
            "exists on a local disk and belongs to the user that runs Hearth."
        ) from error
    return version


@contextmanager
def _connected(path: Path, options: str, timeout_seconds: float = 5.0) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode={options}"
    with closing(sqlite3.connect(uri, uri=True, timeout=timeout_seconds, isolation_level=None)) as connection:
        yield connection


def _identity_of(path: Path) -> tuple[int, int]:
    """Return what shows whether a path still names the same file. Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _create(path: Path) -> None:
    # Asked in this order, because another process may be making both right now
    log = _beside(path, "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    if path.exists():
        return
    if has_log:
        raise StoreError(
            f"The key database {path} is gone, but its log {log.name} is still there, so it was moved or "
            f"deleted. Put {path.name} back beside its log, or restore a backup. To start over without the "
            f"old keys, move {log.name} aside."
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its -wal and -shm files the mode of the database
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _switch_to_wal(path: Path, connection: sqlite3.Connection, deadline: float) -> None:
    """WAL lets requests read keys while somebody writes. The file remembers it, so this happens once."""
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    while mode != "wal":
        try:
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] == "wal":
                return
        except sqlite3.OperationalError as error:
            # SQLite does not wait here when two processes make the switch at once
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
            continue
        raise StoreError(
            f"The file system of {path} does not allow SQLite's write-ahead log. Use a local disk, not a network share."
        )


def _explained(path: Path, error: sqlite3.Error) -> StoreError:
    name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    if name == "SQLITE_NOTADB":
        return StoreError(f"{path} is not a SQLite database, or its first page is overwritten. {_REMEDY}")
    if name.startswith("SQLITE_CORRUPT"):
        return StoreError(f"The key database {path} is damaged (SQLite: {error}). {_REMEDY}")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreError(
            f"The key database {path} is locked by another program. Close that program (`fuser {path}` "
            "names it) and start again."
        )
    return StoreError(
        f"The key database {path} cannot be opened (SQLite: {error}, {name}). Check that file and directory "
        "belong to the user that runs Hearth, that the disk is not full and that the path is a file on a "
        "local disk."
    )


def _back_up(database: Path, path: Path) -> None:
    # SQLite fills an empty file, so its mode is right before the first hash is in it
    try:
        copy = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise StoreError(
            f"The backup {path} cannot be made: {error.strerror}. Name a file that does not exist yet, in a "
            "folder that exists."
        ) from error
    try:
        with _connected(database, "rw") as connection:
            connection.execute("VACUUM INTO ?", (str(path.absolute()),))
        os.fsync(copy)
    except (sqlite3.Error, OSError) as error:
        path.unlink(missing_ok=True)
        raise StoreError(f"The backup {path} failed: {error}. Is the disk full? Nothing was left there.") from error
    finally:
        os.close(copy)


def restore(backup: Path, database: Path, now: datetime) -> tuple[str, int, list[Path]]:
    """Check `backup` and put a copy of it, mode 0600, at `database`; the old files, with their log, are kept aside.

    Returns schema version, number of keys, and where the old files are now. Copying over the file by hand fails if a
    killed server left a log: SQLite replays it over the copy. The caller ensures that no server runs meanwhile. Blocks.
    Raises StoreError, and then the old database is as it was (or aside, if the disk failed in the last step).
    """
    if not backup.is_file():
        raise StoreError(f"There is no file {backup}. Name one that `hearth backup` wrote.")
    if database.exists() and backup.samefile(database):
        raise StoreError(f"{backup} is the database itself. Name a copy that `hearth backup` wrote.")
    part = _beside(database, ".restoring")
    try:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete(part)  # of one that was killed
        try:
            version, keys = _checked_copy(backup, part)
            aside = _move_aside(database, f".before-{now:%Y%m%dT%H%M%SZ}")
            part.replace(database)
            sync_folder(database.parent)
        finally:
            _delete(part)
    except sqlite3.Error as error:
        raise _damaged(backup, str(error)) from error
    except OSError as error:
        raise StoreError(
            f"{database} cannot be written: {error.strerror}. Check that the data directory belongs to you and that "
            "its disk is not full."
        ) from error
    return version, keys, aside


def _checked_copy(backup: Path, part: Path) -> tuple[str, int]:
    """Return schema version and the number of keys, when all pages are sound and the tables are ours.

    Copied page by page: a log beside the backup is included, and the copy needs none.
    """
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    # Without a log nothing is written beside it, so a backup may be on a read-only disk
    options = "ro" if _beside(backup, "-wal").exists() else "ro&immutable=1"
    with _connected(backup, options) as source, closing(sqlite3.connect(part)) as copy:
        source.backup(copy)
        problems = [str(row[0]) for row in copy.execute("PRAGMA integrity_check(5)")]
        if problems != ["ok"]:
            raise _damaged(backup, problems[0])
        if not {VERSION_TABLE, "api_key"} <= {row[0] for row in copy.execute(_TABLES)}:
            raise StoreError(f"{backup} is not a database of Hearth: it has no keys. Nothing was changed.")
        (version,) = copy.execute(_VERSION).fetchone()
        (keys,) = copy.execute("SELECT count(*) FROM api_key").fetchone()
    if not is_known(version):
        raise StoreError(
            f"{backup} has schema {version[:32]!r}; this release of Hearth knows schemas up to {HEAD}. Restore it with "
            "the release that made it. Nothing was changed."
        )
    return version, keys


def _damaged(backup: Path, said: str) -> StoreError:
    return StoreError(
        f"{backup} is damaged, or no SQLite database (SQLite: {said}). Nothing was changed. Take another backup."
    )


def _delete(part: Path) -> None:
    for suffix in _SUFFIXES:
        _beside(part, suffix).unlink(missing_ok=True)


def _move_aside(database: Path, ending: str) -> list[Path]:
    """Rename the files so that SQLite still takes them for one database."""
    moved = []
    for suffix in _SUFFIXES:
        old, new = _beside(database, suffix), _beside(database, ending + suffix)
        if old.exists():
            if new.exists():
                raise StoreError(f"{new} exists already. Run this again in a second.")
            moved.append(old.rename(new))
    return moved

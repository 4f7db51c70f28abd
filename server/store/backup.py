"""Writes a copy of a SQLite database, and puts one back in its place; the old one, with its log, is kept aside.

Copying over the file by hand does nothing where a log is left of a server that was killed: SQLite replays it over the
copy. That no server runs while a copy is put back is the caller's to see to.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from server.store.errors import StoreError
from server.store.migrations import HEAD, VERSION_TABLE, is_known

_FILE_SUFFIXES = ("", "-wal", "-shm")  # the database first: a log without its database is refused by every start


@dataclass(frozen=True, slots=True)
class Restored:
    """What was put there, and where the old files are now."""

    version: str
    keys: int
    aside: tuple[Path, ...]


def back_up(database: Path, path: Path) -> None:
    """Write a complete copy to `path`, mode 0600, while everything goes on. Blocks. Raises StoreError."""
    # SQLite fills an empty file, so its mode is right before the first hash is in it
    try:
        copy = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise StoreError(
            f"The backup {path} cannot be made: {error.strerror}. Name a file that does not exist yet, in a "
            "folder that exists."
        ) from error
    try:
        uri = f"{database.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            connection.execute("VACUUM INTO ?", (str(path.absolute()),))
        os.fsync(copy)
    except (sqlite3.Error, OSError) as error:
        path.unlink(missing_ok=True)
        raise StoreError(f"The backup {path} failed: {error}. Is the disk full? Nothing was left there.") from error
    finally:
        os.close(copy)


def restore(backup: Path, database: Path, now: datetime) -> Restored:
    """Check `backup` and put a copy of it, mode 0600, at `database`. Blocks.

    Raises StoreError, and then the old database is as it was (or aside, if the disk failed in the last step).
    """
    if not backup.is_file():
        raise StoreError(f"There is no file {backup}. Name one that `hearth backup` wrote.")
    if database.exists() and backup.samefile(database):
        raise StoreError(f"{backup} is the database itself. Name a copy that `hearth backup` wrote.")
    part = database.with_name(f"{database.name}.restoring")
    try:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for suffix in _FILE_SUFFIXES:  # of one that was killed
            part.with_name(part.name + suffix).unlink(missing_ok=True)
        try:
            _copy(backup, part)
            version, keys = _verify_copy(backup, part)
            aside = _move_aside(database, now)
            part.replace(database)
            _sync(database.parent)
        finally:
            for suffix in _FILE_SUFFIXES:
                part.with_name(part.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{database} cannot be written: {error.strerror}. Check that the data directory belongs to you and that "
            "its disk is not full."
        ) from error
    return Restored(version, keys, aside)


def _copy(backup: Path, part: Path) -> None:
    """Copy page by page: a log that lies beside the backup counts, and the copy needs none."""
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    # Without a log nothing is written beside it, so that a backup may lie on a disk that cannot be written
    alone = "" if backup.with_name(f"{backup.name}-wal").exists() else "&immutable=1"
    try:
        with (
            closing(sqlite3.connect(f"{backup.absolute().as_uri()}?mode=ro{alone}", uri=True)) as source,
            closing(sqlite3.connect(part)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise _damaged_error(backup, str(error)) from error


def _verify_copy(backup: Path, part: Path) -> tuple[str, int]:
    """Return schema version and the number of keys, when all pages are sound and the tables are ours."""
    try:
        with closing(sqlite3.connect(part)) as connection:
            problems = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(5)")]
            if problems != ["ok"]:
                raise _damaged_error(backup, problems[0])
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {VERSION_TABLE, "api_key"} <= tables:
                raise StoreError(f"{backup} is no database of Hearth: it has no keys. Nothing was changed.")
            (version,) = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()  # noqa: S608 - ours
            (keys,) = connection.execute("SELECT count(*) FROM api_key").fetchone()
    except sqlite3.Error as error:
        raise _damaged_error(backup, str(error)) from error
    if not is_known(version):
        raise StoreError(
            f"{backup} has schema {version[:32]!r}; this release of Hearth knows schemas up to {HEAD}. Restore it with "
            "the release that made it. Nothing was changed."
        )
    return version, keys


def _damaged_error(backup: Path, said: str) -> StoreError:
    return StoreError(
        f"{backup} is damaged, or no SQLite database (SQLite: {said}). Nothing was changed. Take another backup."
    )


def _move_aside(database: Path, now: datetime) -> tuple[Path, ...]:
    """Rename the files so that SQLite still takes them for one database."""
    name = f"{database.name}.before-{now:%Y%m%dT%H%M%SZ}"
    moved = []
    for suffix in _FILE_SUFFIXES:
        old, new = database.with_name(database.name + suffix), database.with_name(name + suffix)
        if old.exists():
            if new.exists():
                raise StoreError(f"{new} exists already. Run this again in a second.")
            old.rename(new)
            moved.append(new)
    return tuple(moved)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

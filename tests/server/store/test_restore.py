"""`hearth restore`: what a killed server left is not replayed over the backup, and nothing is lost on the way."""

import asyncio
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from server.cli import app
from server.instance import only_one
from server.store.database import Database
from server.store.keys import KeyStore
from server.store.sqlite import sqlite_url

# Writes a key into the log of the database and dies as by kill -9, so that nobody folds the log back.
KILLED = """
import asyncio, os, sys
from server.store.database import Database
from server.store.keys import KeyStore

async def main():
    database = await Database.open(sys.argv[1])
    await KeyStore(database).create("of the log", "standard")
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def names(folder: Path) -> list[str]:
    async def read() -> list[str]:
        async with await Database.open(sqlite_url(folder)) as database:
            return [key.name for key in await KeyStore(database).list()]

    return asyncio.run(read())


def restore(folder: Path, backup: Path, **environment: str) -> Result:
    return CliRunner().invoke(app, ["restore", str(backup), "--data-dir", str(folder)], env=environment)


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    async def made() -> None:
        async with await Database.open(sqlite_url(tmp_path)) as database:
            await KeyStore(database).create("of before", "standard")
            await database.backup(tmp_path / "backup.db")

    asyncio.run(made())
    return tmp_path / "backup.db"


def test_the_log_that_a_killed_server_left_is_moved_aside_with_its_database(backup: Path, tmp_path: Path):
    ended = subprocess.run([sys.executable, "-c", KILLED, sqlite_url(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "hearth.db-wal").stat().st_size > 0
    done = restore(tmp_path, backup)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "The previous database was kept as" in done.stdout
    assert "1 keys, schema" in done.stdout
    assert names(tmp_path) == ["of before"]
    assert stat.S_IMODE((tmp_path / "hearth.db").stat().st_mode) == 0o600
    (old,) = [one for one in tmp_path.glob("hearth.db.before-*") if one.suffix.endswith("Z")]
    kept = tmp_path / "kept"
    kept.mkdir()
    for side in ("", "-wal"):
        shutil.copy(f"{old}{side}", kept / f"hearth.db{side}")
    assert sorted(names(kept)) == ["of before", "of the log"], "the old one is whole"


def test_it_makes_the_database_where_there_is_none(backup: Path, tmp_path: Path):
    done = restore(tmp_path / "new" / "data", backup)
    assert done.exit_code == 0, done.stderr
    assert "The previous database was kept as" not in done.stdout
    assert names(tmp_path / "new" / "data") == ["of before"]


def test_while_a_server_runs_it_is_refused(backup: Path, tmp_path: Path):
    before = (tmp_path / "hearth.db").read_bytes()
    with only_one(tmp_path):
        done = restore(tmp_path, backup)
    assert done.exit_code == 1
    assert f"A server (process {os.getpid()}) runs on" in done.stderr
    assert (tmp_path / "hearth.db").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file.unlink(), "There is no file"),
        (lambda file: file.write_bytes(b"garbage" * 999), "is damaged, or no SQLite database"),
        (lambda file: file.write_bytes(file.read_bytes()[:12288]), "is damaged, or no SQLite database"),
        (lambda file: file.write_bytes(b""), "is not a database of Hearth"),
        (lambda file: sql(file, "DROP TABLE api_key"), "is not a database of Hearth"),
        (lambda file: sql(file, "UPDATE hearth_schema SET version_num = '9999'"), "Restore it with the release"),
    ],
)
def test_what_is_no_backup_is_refused_and_changes_nothing(change, told, backup: Path, tmp_path: Path):
    before, others = (tmp_path / "hearth.db").read_bytes(), {one.name for one in tmp_path.iterdir()} - {"backup.db"}
    change(backup)
    done = restore(tmp_path, backup)
    assert done.exit_code == 1
    assert told in done.stderr
    assert (tmp_path / "hearth.db").read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} - {"server.lock", "backup.db"} == others


def sql(file: Path, statement: str) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute(statement)


def test_the_database_itself_is_no_backup_of_it(backup: Path, tmp_path: Path):
    done = restore(tmp_path, tmp_path / "hearth.db")
    assert done.exit_code == 1
    assert "is the database itself" in done.stderr
    assert names(tmp_path) == ["of before"]


def test_of_postgresql_its_own_tool_is_named(backup: Path, tmp_path: Path):
    done = restore(tmp_path, backup, HEARTH_DATABASE_URL="postgresql+psycopg://user:secret@host/database")
    assert done.exit_code == 1
    assert "pg_restore" in done.stderr
    assert "secret" not in done.stderr

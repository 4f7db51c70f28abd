"""The database file: opening, damage, and several processes. Real SQLite files, real kills."""

import asyncio
import os
import random
import sqlite3
import stat
import traceback
from contextlib import closing
from pathlib import Path

import pytest
from alembic.operations import Operations
from serving import async_poll_until
from sqlalchemy import Column, Integer, event, exc, insert
from sqlalchemy.ext.asyncio import create_async_engine
from store_parts import authenticate, held, moved_away, opened_by_the_first_release, run_python, writers

from server.store import StoreError, StoreUnavailableError, migrations
from server.store.database import Database, SideTasks
from server.store.keys import KeyLimits, KeyStore, new_key, parse
from server.store.schema import api_key, utc_now
from server.store.sqlite import sqlite_url


async def fill(file: Path, count: int = 60) -> None:
    async with await Database.open(sqlite_url(file)) as database:
        for number in range(count):
            await KeyStore(database).create(f"key {number}" + "x" * 40, "standard")


def contents(file: Path) -> bytes:
    return file.read_bytes()


async def test_a_new_database_and_its_folder_are_the_owners_alone(file: Path, database: Database) -> None:
    await KeyStore(database).create("laptop", "standard")
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
    assert modes == {"hearth.db": 0o600, "hearth.db-wal": 0o600, "hearth.db-shm": 0o600}


async def test_commits_are_synced_to_the_disk_and_log_ahead(file: Path, database: Database) -> None:
    async with database.reading() as connection:
        pragmas = {
            name: (await connection.exec_driver_sql(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 50}


async def test_whether_a_commit_waits_for_the_disk_is_its_own_matter(database: Database) -> None:
    ask, synced = {
        "sqlite": ("PRAGMA synchronous", {2: True, 1: False}),
        "postgresql": ("SHOW synchronous_commit", {"on": True, "off": False}),
    }[database.kind]
    for durable in (False, True, True, False) * 3:  # more often than there are connections
        async with database.writing(durable=durable) as connection:
            assert synced[(await connection.exec_driver_sql(ask)).scalar_one()] is durable


@pytest.mark.parametrize("name", ["hearth.db", "a b#c%20?d.db", "ü.db"])
async def test_the_url_of_a_path_leads_back_to_it(tmp_path: Path, name: str) -> None:
    async with await Database.open(sqlite_url(tmp_path / name)):
        assert (tmp_path / name).stat().st_size > 0


def test_the_url_of_a_folder_is_that_of_hearth_db_in_it(tmp_path: Path) -> None:
    assert sqlite_url(tmp_path) == sqlite_url(tmp_path / "hearth.db")


async def test_a_database_of_the_first_release_gets_the_tables_that_the_code_describes(database_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from server.store.schema import metadata

    await opened_by_the_first_release(database_url)
    async with await Database.open(database_url) as database, database.reading() as connection:
        differences = await connection.run_sync(
            lambda plain: compare_metadata(
                MigrationContext.configure(plain, opts={"version_table": migrations.VERSION_TABLE}), metadata
            )
        )
    assert differences == []


async def test_a_migration_is_made_once_by_those_who_come_at_the_same_time(database_url: str) -> None:
    async def upgraded(database: Database) -> None:
        async with database.writing() as connection:
            await connection.run_sync(migrations.upgrade, (add_a_column,))

    def add_a_column(op: Operations) -> None:
        op.add_column("bucket", Column("added", Integer))

    opened = await asyncio.gather(*(Database.open(database_url) for _ in range(5)))  # the tables are made once, too
    await asyncio.gather(*map(upgraded, opened))
    async with opened[0].reading() as connection:
        version = (await connection.exec_driver_sql("SELECT version_num FROM hearth_schema")).scalar_one()
        await connection.exec_driver_sql("SELECT added FROM bucket")
    assert int(version) == int(migrations.HEAD) + 1
    for database in opened:
        await database.close()


def test_an_up_to_date_database_opens_without_loading_alembic(file: Path) -> None:
    asyncio.run(fill(file, 1))
    program = (
        "import asyncio, sys; from server.store.database import Database\n"
        "async def main():\n"
        "    async with await Database.open(sys.argv[1]): print('alembic' in sys.modules)\n"
        "asyncio.run(main())"
    )
    assert run_python(program, sqlite_url(file)) == "False\n"


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:////tmp/x.db?mode=ro",
        "mysql+aiomysql://hearth:swordfish@db/hearth",
        "postgresql://hearth:swordfish@db/hearth",
        "postgresql+psycopg://hearth:a@swordfish@db/hearth",
        "postgresql+psycopg://hearth:a@b/swordfish@db/hearth",
        "postgresql+psycopg://hearth:a@b:swordfish@db/hearth",
        "postgresql+psycopg://hearth:swordfish@db",
        "nonsense swordfish",
    ],
)
async def test_a_url_that_leads_nowhere_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"sqlite\+aiosqlite:////|postgresql\+psycopg://user:password@") as caught:
        await Database.open(url)
    assert "swordfish" not in "".join(traceback.format_exception(caught.value))


def overwritten(file: Path, offset: int, length: int) -> bytes:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(random.Random(7).randbytes(length))  # noqa: S311 - the same damage every time
    return file.read_bytes()


@pytest.mark.parametrize(
    ("offset", "length", "words"),
    [(4096, 8192, "is damaged"), (0, 100, "is not a SQLite database"), (100, 3000, "is damaged")],
)
async def test_a_damaged_file_is_refused_with_the_remedy_and_left_as_it_is(
    file: Path, offset: int, length: int, words: str
) -> None:
    await fill(file)
    before = overwritten(file, offset, length)
    with pytest.raises(StoreError, match=words) as caught:
        await Database.open(sqlite_url(file))
    assert str(file) in caught.value.message
    assert "backup" in caught.value.message
    assert contents(file) == before


async def test_a_cut_off_file_is_refused_and_left_as_it_is(file: Path) -> None:
    await fill(file)
    before = contents(file)[:-4096]
    os.truncate(file, len(before))
    with pytest.raises(StoreError, match="damaged"):
        await Database.open(sqlite_url(file))
    assert contents(file) == before


@pytest.mark.parametrize("version", ["0006", "9999", "f00ba4"])
async def test_a_database_of_a_newer_release_is_refused_and_left_as_it_is(file: Path, version: str) -> None:
    await fill(file, 1)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE hearth_schema SET version_num = ?", (version,))
    before = contents(file)
    with pytest.raises(StoreError, match="newer release"):
        await Database.open(sqlite_url(file))
    assert contents(file) == before


async def test_the_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = contents(file)
    with pytest.raises(StoreError, match="another program"):
        await Database.open(sqlite_url(file))
    assert contents(file) == before


async def test_a_database_that_was_moved_away_from_its_log_is_not_made_anew(file: Path) -> None:
    async with await Database.open(sqlite_url(file)) as database:
        await KeyStore(database).create("laptop", "standard")
        with moved_away(file):
            with pytest.raises(StoreError, match="is gone, but its log"):
                await Database.open(sqlite_url(file))
            assert not await asyncio.to_thread(file.exists)


async def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        await Database.open(f"sqlite+aiosqlite:///{tmp_path}")


async def test_a_locked_database_is_refused_at_the_start(file: Path) -> None:
    await fill(file, 1)
    with held(file, "PRAGMA locking_mode = EXCLUSIVE"), pytest.raises(StoreError, match="is locked"):
        await Database.open(sqlite_url(file), busy_timeout_seconds=0.05)


async def test_damage_while_running_fails_closed_for_unknown_keys(file: Path) -> None:
    await fill(file)
    async with await Database.open(sqlite_url(file)) as database:
        overwritten(file, 4096, 4096 * 8)
        with pytest.raises(StoreUnavailableError):
            await authenticate(KeyStore(database), new_key())


async def test_processes_that_open_a_new_database_and_write_at_once_all_succeed(database_url: str) -> None:
    def run() -> str:
        with writers(database_url) as process:
            return process.communicate("5 8\n", timeout=60)[0]

    lines = (await asyncio.to_thread(run)).splitlines()
    assert [line for line in lines if line.startswith("ended")] == ["ended 0"] * 5
    acknowledged = {line.split()[1] for line in lines if not line.startswith("ended")}
    assert len(acknowledged) == 40
    async with await Database.open(database_url) as database:
        assert {key.public_id for key in await KeyStore(database).list()} == acknowledged


async def test_a_database_of_an_older_release_is_brought_up_to_date_and_keys_stay(database_url: str) -> None:
    await opened_by_the_first_release(database_url)
    text = new_key()
    parsed = parse(text)
    assert parsed is not None
    row = {"public_id": parsed.public_id, "secret_sha256": parsed.sha256, "name": "laptop", "tier": "standard"}
    row |= {"scopes": ["chat"], "models": ["a"], "created_at": utc_now()}
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(insert(api_key).values(row))
    await engine.dispose()
    async with await Database.open(database_url) as database:
        found = await authenticate(KeyStore(database), text)
        assert found is not None
        assert (found.name, found.models, found.notes, found.limits) == ("laptop", ("a",), "", KeyLimits())


async def test_a_backup_is_whole_the_owners_alone_and_made_while_others_write(file: Path, database: Database) -> None:
    store = KeyStore(database)
    text, key = await store.create("laptop", "standard")
    copy = file.with_name("copy.db")
    await asyncio.gather(database.backup(copy), *(store.create(f"key {number}", "standard") for number in range(20)))
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    async with await Database.open(sqlite_url(copy)) as restored:
        assert await authenticate(KeyStore(restored), text) == key


async def test_a_backup_overwrites_nothing_and_says_what_is_wrong(file: Path, database: Database) -> None:
    there = file.with_name("there")
    there.write_bytes(b"")
    for path, words in ((there, "File exists"), (file.with_name("no") / "copy.db", "No such file")):
        with pytest.raises(StoreError, match=words):
            await database.backup(path)
    assert contents(there) == b""


async def test_while_another_process_writes_keys_are_read_and_writes_are_refused(
    file: Path, database: Database
) -> None:
    store = KeyStore(database)
    text, key = await store.create("laptop", "standard")
    with held(file):
        assert await authenticate(store, text) == key
        assert await authenticate(store, new_key()) is None
        with pytest.raises(StoreUnavailableError, match="locked"):
            await store.create("phone", "standard")
    await store.create("phone", "standard")


async def test_a_connection_that_is_closed_twice_in_a_row_does_not_end_the_look(database: Database) -> None:
    """As a server does that is being restarted: the pool tries twice."""
    closed: list[int] = []

    def close(*_: object) -> None:
        closed.append(1)
        raise exc.DisconnectionError

    engine = database._engine.sync_engine  # where the pool is
    event.listen(engine, "checkout", close)
    async with database.watched():
        await async_poll_until(lambda: database.failing is not None, 60)
        with pytest.raises(StoreUnavailableError):
            async with database.reading():
                pass
        event.remove(engine, "checkout", close)
        await async_poll_until(lambda: database.failing is None, 60)
    assert len(closed) >= 2


async def test_what_is_done_again_and_again_outlives_an_error() -> None:
    tasks, done = SideTasks(), []

    async def work() -> None:
        done.append(1)
        raise RuntimeError("this time it fails")

    tasks.every(0.001, work)
    await async_poll_until(lambda: len(done) > 2, 60)
    await tasks.cancel()

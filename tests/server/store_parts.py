"""Real locks, moved files and second processes for the tests of the store."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from sqlalchemy import func, make_url, select
from sqlalchemy.ext.asyncio import create_async_engine

from server.store.database import Database
from server.store.keys import ApiKey, KeyStore, parse
from server.store.schema import quota_day

ROOT = Path(__file__).parents[2]

# Imports once and forks, because a Python start per writer would take most of the test's time. For a line
# "WRITERS KEYS" it forks writers; they say their pid and each key once acknowledged; then it says how each ended.
WRITERS = """
import asyncio, os, sys
import aiosqlite, alembic.command
from server.store.database import Database
from server.store.keys import KeyStore

def say(line):
    os.write(1, (line + "\\n").encode())

async def create_keys(count):
    async with await Database.open(sys.argv[1], busy_timeout_seconds=60) as database:
        store = KeyStore(database)
        for number in range(count):
            _, key = await store.create(f"key {number}", "standard")
            say(f"{os.getpid()} {key.public_id}")

say("ready")
for line in sys.stdin:
    writers, keys = map(int, line.split())
    for _ in range(writers):
        if os.fork() == 0:
            code = 1
            try:
                asyncio.run(create_keys(keys))
                code = 0
            finally:
                os._exit(code)
    for _ in range(writers):
        _, status = os.wait()
        say(f"ended {os.waitstatus_to_exitcode(status)}")
"""


async def authenticate(store: KeyStore, text: str) -> ApiKey | None:
    """The usable key with this text, asked of the store without a cache."""
    parsed = parse(text)
    return None if parsed is None else await store.check(parsed)


async def opened_by_the_first_release(url: str) -> None:
    script = (ROOT / "tests" / "server" / "store" / "first_release.sql").read_text(encoding="utf-8")
    if url.startswith("sqlite"):
        Path(make_url(url).database or "").parent.mkdir(exist_ok=True)
        types = {"TIMESTAMP WITH TIME ZONE": "DATETIME", "BYTEA": "BLOB", "BIGSERIAL": "INTEGER", " PRECISION": ""}
        for theirs, ours in types.items():
            script = script.replace(theirs, ours)
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        for statement in script.split(";\n"):
            await connection.exec_driver_sql(statement)
    await engine.dispose()


@contextmanager
def moved_away(file: Path) -> Iterator[None]:
    away = file.rename(file.with_suffix(".away"))
    yield
    away.rename(file)


@contextmanager
def held(file: Path, *statements: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in (*statements, "BEGIN EXCLUSIVE"):
            connection.execute(statement)
        yield connection


async def quota_used(database: Database, owner: str, kind: str = "images") -> int:
    """On all days that are kept."""
    query = select(func.sum(quota_day.c.used)).where(quota_day.c.owner == owner, quota_day.c.kind == kind)
    async with database.reading() as connection:
        return int(await connection.scalar(query) or 0)


def run_python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


def writers(url: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return ready_python(WRITERS, url)


@contextmanager
def ready_python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has said "ready", with pipes to and from it."""
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()

"""Kills processes with SIGKILL while they create, rotate and revoke keys, and looks for what was lost.

By hand: `PYTHONPATH=. python tests/server/store/crash_store.py KILLS [URL]`.
"""

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from server.store.audit import read_entries
from server.store.database import Database
from server.store.keys import KeyStore
from server.store.sqlite import sqlite_url

ROOT = Path(__file__).parents[3]

# Imports once and forks, because a Python start per writer would take most of the time. For each line it forks
# one, which says its pid and then each change once acknowledged; then it says how that one ended.
_WRITERS = """
import asyncio, os, sys
from datetime import timedelta
import aiosqlite, alembic.command
if "postgresql" in sys.argv[1]:
    import psycopg
from server.store.database import Database
from server.store.keys import KeyStore

def say(line):
    os.write(1, (line + "\\n").encode())

async def change_keys():
    async with await Database.open(sys.argv[1], busy_timeout_seconds=60) as database:
        store = KeyStore(database)
        say(f"pid {os.getpid()}")
        while True:
            _, key = await store.create("key", "standard")
            say(f"create {key.public_id}")
            _, successor = await store.rotate(key.public_id, timedelta(days=1))
            say(f"rotate {key.public_id}")
            await store.revoke(successor.public_id)
            say(f"revoke {successor.public_id}")

say("ready")
for line in sys.stdin:
    if os.fork() == 0:
        try:
            asyncio.run(change_keys())
        finally:
            os._exit(1)
    _, status = os.wait()
    say(f"ended {os.waitstatus_to_exitcode(status)}")
"""


@dataclass
class Acknowledged:
    """Public ids by what somebody was told had been done to them."""

    create: set[str] = field(default_factory=set)
    rotate: set[str] = field(default_factory=set)
    revoke: set[str] = field(default_factory=set)

    def note(self, line: str) -> None:
        action, public_id = line.split()
        getattr(self, action).add(public_id)

    def __len__(self) -> int:
        return len(self.create) + len(self.rotate) + len(self.revoke)


def kill_writers(url: str, kills: int) -> Acknowledged:
    """Kill that many, each somewhere in its first changes; everything they had acknowledged by then."""
    dice = random.Random(20)  # noqa: S311 - the same moments every time
    told = Acknowledged()
    command = [sys.executable, "-c", _WRITERS, url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(kills):
            process.stdin.write("\n")
            pid = int(process.stdout.readline().split()[1])
            lines = [process.stdout.readline() for _ in range(dice.randint(1, 6))]
            select.select([], [], [], dice.random() * 0.01)  # anywhere in the next commits
            os.kill(pid, signal.SIGKILL)
            # What was acknowledged before the kill but not read yet counts too
            lines += list(iter(process.stdout.readline, "ended -9\n"))
            for line in lines:
                told.note(line)
        process.stdin.close()
    return told


async def check_nothing_is_lost(url: str, told: Acknowledged) -> None:
    """Opening checks the database's integrity; then every acknowledged change is there, with its audit entry."""
    async with await Database.open(url) as database:
        keys = {key.public_id: key for key in await KeyStore(database).list()}
        entries = await read_entries(database, limit=10_000)
        if database.kind == "sqlite":
            async with database.reading() as connection:
                assert (await connection.exec_driver_sql("PRAGMA integrity_check")).scalars().all() == ["ok"]
    assert told.create <= keys.keys()
    assert all(keys[public_id].replaced_by in keys for public_id in told.rotate)
    assert all(keys[public_id].revoked_at for public_id in told.revoke)
    # Neither a change without its entry nor an entry without its change
    counted = Counter(entry.action for entry in entries)
    assert counted["key.create"] == len(keys) - counted["key.rotate"]
    assert counted["key.rotate"] == sum(key.replaced_by is not None for key in keys.values())
    assert counted["key.revoke"] == sum(key.revoked_at is not None for key in keys.values())


def main(kills: str, url: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = url or sqlite_url(Path(folder) / "hearth.db")
        told = kill_writers(where, int(kills))
        asyncio.run(check_nothing_is_lost(where, told))
    sys.stdout.write(f"{kills} kills, {len(told)} acknowledged changes, none lost\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

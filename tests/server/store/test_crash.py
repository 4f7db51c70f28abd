"""What a killed process leaves behind, on both databases."""

import asyncio
import signal
import sys
from asyncio.subprocess import Process

import pytest
from crash_store import ROOT, check_nothing_is_lost, kill_writers

from server.store.database import Database
from server.store.limits import Ask, Buckets, Level

# Takes one at a time, gives half of it back at once, and says so.
_SPENDER = """
import asyncio, sys
from server.store.database import Database
from server.store.limits import Ask, Buckets

async def main():
    async with await Database.open(sys.argv[1]) as database, Buckets(database, return_every_seconds=0.05) as buckets:
        while True:
            await buckets.take(Ask("b", 2, 1e5, 1e9))
            buckets.give_back(Ask("b", 1, 1e5, 1e9))
            print("spent", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.rounds)])
async def test_no_acknowledged_change_of_a_key_is_lost_when_its_writer_is_killed(database_url: str, kills: int) -> None:
    told = await asyncio.to_thread(kill_writers, database_url, kills)
    assert len(told) >= kills
    await check_nothing_is_lost(database_url, told)


async def spend_until_killed(url: str) -> int:
    command = [sys.executable, "-c", _SPENDER, url]
    process: Process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(30)]
    process.send_signal(signal.SIGKILL)
    rest = await process.stdout.read()
    await process.wait()
    return len(lines) + rest.count(b"\n")


async def test_a_killed_process_gains_no_budget(database_url: str) -> None:
    ask = Ask("b", 0, 1e5, 1e9)
    async with await Database.open(database_url) as database, Buckets(database) as buckets:
        left = 100_000
        for _ in range(3):
            left -= await spend_until_killed(database_url)
            answer = await buckets.take(ask)
            assert isinstance(answer, Level)
            assert answer.remaining <= left
            left = answer.remaining

"""Limits per minute: exact across processes, and fair through jumps of the clock."""

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update
from store_parts import ROOT, held

from server.store import StoreUnavailableError
from server.store.database import Database
from server.store.limits import Ask, Buckets, Level, Refused
from server.store.schema import bucket
from server.store.sqlite import sqlite_url

DAY = 24 * 3600


class Clock:
    """Nanoseconds since 1970 that pass when a test says so. SQLite only: PostgreSQL has its own."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000.0

    def __call__(self) -> int:
        return int(self.seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def buckets(database: Database, clock: Clock) -> AsyncIterator[Buckets]:
    async with Buckets(database, clock_nanoseconds=clock) as buckets:
        yield buckets


def slow(cost: float = 1, name: str = "k") -> Ask:
    """Of a bucket with 20 units that gets one back in three minutes: none during a test."""
    return Ask(name, cost, 20, 3600)


async def level(buckets: Buckets, ask: Ask) -> Level:
    answer = await buckets.take(replace(ask, cost=0))
    found = answer.level if isinstance(answer, Refused) else answer
    assert found is not None
    return found


def passed(answers: list[Level | Refused]) -> int:
    return sum(isinstance(answer, Level) for answer in answers)


_TAKER = """
import asyncio, sys
from server.store.database import Database
from server.store.limits import Ask, Buckets, Level

async def main():
    async with (
        await Database.open(sys.argv[1], busy_timeout_seconds=60) as database,
        Buckets(database, wait_seconds=60) as buckets,
    ):
        print("ready", flush=True)
        sys.stdin.readline()
        asks = [buckets.take(Ask("k", 1, 20, 3600)) for _ in range(500)]
        print(sum(isinstance(answer, Level) for answer in await asyncio.gather(*asks)))
asyncio.run(main())
"""


async def test_of_a_thousand_takes_in_two_processes_exactly_the_burst_passes(database_url: str) -> None:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", _TAKER, database_url]
    takers = [await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe) for _ in range(2)]
    for taker in takers:
        assert taker.stdout is not None
        assert await taker.stdout.readline() == b"ready\n"
    outputs = await asyncio.gather(*(taker.communicate(b"go\n") for taker in takers))
    assert sum(int(output) for output, _ in outputs) == 20


async def test_what_never_fits_is_told_apart_and_takes_nothing(buckets: Buckets) -> None:
    assert await buckets.take(slow(21)) == Refused(math.inf)
    assert await buckets.take(Ask("c", 1, 0)) == Refused(math.inf)
    assert (await level(buckets, slow())).remaining == 20


async def test_unused_budget_comes_back_at_once_and_never_beyond_full(buckets: Buckets, database: Database) -> None:
    assert isinstance(await buckets.take(slow(20)), Level)
    buckets.give_back(slow(12))
    buckets.give_back(slow(3))
    assert isinstance(await buckets.take(slow(15)), Level)
    assert isinstance(await buckets.take(slow(1)), Refused)
    buckets.give_back(slow(500))
    await buckets.flush()
    async with Buckets(database) as other:
        assert passed([await other.take(slow()) for _ in range(30)]) <= 20


async def test_what_was_given_back_reaches_other_processes_by_itself(database: Database) -> None:
    async with Buckets(database, return_every_seconds=0.01) as one, Buckets(database) as other:
        assert isinstance(await one.take(slow(20)), Level)
        one.give_back(slow(20))
        async with asyncio.timeout(60):
            while not isinstance(await other.take(slow(20)), Level):  # noqa: ASYNC110 - the database tells nobody
                await asyncio.sleep(0.01)


async def test_stopping_writes_what_was_given_back(database: Database) -> None:
    async with Buckets(database) as buckets:
        await buckets.take(slow(20))
        buckets.give_back(slow(20))
    async with Buckets(database) as buckets:
        assert isinstance(await buckets.take(slow(20)), Level)


async def test_a_refusal_says_when_it_will_fit(file: Path, buckets: Buckets, clock: Clock) -> None:
    ask = Ask("k", 10, 60)
    for _ in range(6):
        assert isinstance(await buckets.take(ask), Level)
    clock.seconds += 4
    refused = await buckets.take(ask)
    assert isinstance(refused, Refused)
    assert refused.retry_after_seconds == pytest.approx(6, abs=1e-5)
    assert refused.level == Level("k", 60, 4, pytest.approx(56, abs=1e-5))
    clock.seconds += refused.retry_after_seconds + 1e-5
    assert isinstance(await buckets.take(ask), Level)
    assert isinstance(await buckets.take(ask), Refused)


@pytest.mark.parametrize("days", [-1, 1, -4000, 4000])
async def test_a_jump_of_the_clock_and_back_shuts_a_bucket_no_longer_than_an_empty_one(
    file: Path, buckets: Buckets, clock: Clock, days: int
) -> None:
    ask = Ask("k", 1, 60)
    for jump in (days * DAY, -days * DAY):
        await buckets.take(ask)
        clock.seconds += jump
        await buckets.take(ask)  # whatever it answers, it brings the bucket back
        clock.seconds += 1.001
        assert isinstance(await buckets.take(ask), Level)
        clock.seconds += 60
        assert passed([await buckets.take(ask) for _ in range(80)]) == 60


async def test_a_bucket_filled_until_the_day_after_tomorrow_is_brought_back(
    buckets: Buckets, database: Database
) -> None:
    ask = Ask("k", 1, 20, 0.1)
    await buckets.take(ask)
    async with database.writing() as connection:
        await connection.execute(update(bucket).values(tat=bucket.c.tat + 2 * DAY * 10**9))
    refused = await buckets.take(ask)
    assert isinstance(refused, Refused)
    assert refused.retry_after_seconds == pytest.approx(1 / 200)
    async with database.reading() as connection:
        [tat] = (await connection.execute(select(bucket.c.tat))).scalars()
    async with Buckets(database) as fresh:
        now = await level(fresh, ask)
    assert now.reset_seconds <= 0.1
    assert tat > 0


async def test_what_is_given_back_adds_up_to_the_nanosecond(buckets: Buckets) -> None:
    assert isinstance(await buckets.take(slow(20)), Level)
    buckets.give_back(slow(2))
    buckets.give_back(slow(3))
    assert buckets._returns == {"k": 5 * 180 * 10**9}
    assert (await buckets.take(slow(6))) == Refused(
        pytest.approx(180, abs=1), Level("k", 20, 5, pytest.approx(2700, abs=1))
    )


async def test_a_caller_that_leaves_gets_its_budget_back(buckets: Buckets) -> None:
    callers = [asyncio.create_task(buckets.take(slow())) for _ in range(20)]
    await asyncio.sleep(0)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    async with asyncio.timeout(60):
        while not isinstance(await buckets.take(slow(20)), Level):  # noqa: ASYNC110 - their takes end in a thread
            await asyncio.sleep(0.01)


async def test_a_locked_database_is_unavailable_and_what_was_given_back_is_kept(file: Path, buckets: Buckets) -> None:
    await buckets.take(slow(20))
    with held(file):
        buckets.give_back(slow(20))
        with pytest.raises(StoreUnavailableError, match="locked"):
            await buckets.take(slow(20))
    assert isinstance(await buckets.take(slow(20)), Level)


async def test_full_buckets_are_forgotten_at_the_next_start(file: Path, buckets: Buckets, database: Database) -> None:
    await buckets.take(slow(1, "a"))
    await buckets.take(Ask("b", 1, 1, 1))
    later = Clock()
    later.seconds += 60
    async with Buckets(database, clock_nanoseconds=later), database.reading() as connection:
        assert (await connection.execute(select(bucket.c.name))).scalars().all() == ["a"]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 12), st.booleans()), max_size=40))
def test_no_more_than_the_burst_and_what_flowed_back_ever_passes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int, bool]]
) -> None:
    async def run(file: Path) -> None:
        clock = Clock()
        start = clock.seconds
        async with await Database.open(sqlite_url(file)) as database, Buckets(database, clock_nanoseconds=clock) as it:
            spent, available = 0, 10.0
            for pause, cost, unused in steps:
                clock.seconds += pause
                available = min(10.0, available + pause * 0.5)
                answer = await it.take(Ask("k", cost, 10, 20))
                assert (answer == Refused(math.inf)) == (cost > 10)
                if cost <= 10 and abs(available - cost) > 1e-3:
                    assert isinstance(answer, Level) == (cost < available)
                if isinstance(answer, Level):
                    spent, available = spent + cost, available - cost
                    if unused:
                        it.give_back(Ask("k", cost, 10, 20))
                        spent, available = spent - cost, available + cost
                assert spent <= 10 + (clock.seconds - start) * 0.5 + 1e-3

    asyncio.run(run(tmp_path_factory.mktemp("buckets") / "hearth.db"))


def test_levels_are_whole_units_and_never_negative() -> None:
    ask = Ask("k", 1, 7)
    assert ask.level(None, 0) == Level("k", 7, 7, 0)
    assert ask.level(10**20, 0).remaining == 0
    assert [ask.level(n * ask.nanoseconds, 0).remaining for n in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]

"""Images per day: taken whole or not at all, and what was not made comes back, also when nobody waits any more."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from store_parts import moved_away, quota_used

from server.store.database import Database
from server.store.limits import QuotaExceeded, Quotas, QuotaTaken
from server.store.schema import quota_day

NOON = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)


def quotas_of(database: Database) -> Quotas:
    return Quotas(database, clock=lambda: NOON)


async def used(database: Database) -> int:
    return await quota_used(database, "zoe")


async def take(quotas: Quotas, count: int, per_day: int) -> QuotaTaken:
    taken = await quotas.take("zoe", "images", count, per_day)
    assert isinstance(taken, QuotaTaken)
    return taken


async def test_what_was_not_made_is_given_back(database: Database):
    async with quotas_of(database) as quotas:
        taken = await take(quotas, 4, 10)
        assert await used(database) == 4
        quotas.give_back(taken, 3)
        quotas.give_back(taken, 0)
    assert await used(database) == 1


async def test_a_caller_who_leaves_while_it_is_taken_has_used_nothing(database: Database):
    for turns in range(12):  # leaves at every point of the way
        async with quotas_of(database) as quotas:
            taking = asyncio.create_task(take(quotas, 4, 100))
            for _ in range(turns):
                await asyncio.sleep(0)
            if taking.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await taking
            else:
                quotas.give_back(taking.result(), 4)
        assert await used(database) == 0


async def test_all_may_be_given_back_one_by_one_and_no_more_than_was_taken(database: Database):
    async with quotas_of(database) as quotas:
        taken = await take(quotas, 3, 10)
        quotas.give_back(taken, 1)
    assert await used(database) == 2
    async with quotas_of(database) as quotas:
        quotas.give_back(taken, 3)
    assert await used(database) == 0


async def test_more_than_a_whole_day_has_is_refused_with_what_is_left(database: Database):
    async with quotas_of(database) as quotas:
        assert await quotas.take("zoe", "images", 5, 4) == QuotaExceeded(4, 4, 11.5 * 3600)
        await take(quotas, 3, 4)
        assert await quotas.take("zoe", "images", 2, 4) == QuotaExceeded(4, 1, 11.5 * 3600)
        assert await quotas.take("zoe", "images", 1, 2) == QuotaExceeded(2, 0, 11.5 * 3600)
        await take(quotas, 1, 4)


async def test_a_month_is_remembered_and_older_days_go(database: Database):
    for days, remembered in ((0, {0}), (1, {0, 1}), (31, {0, 1, 31}), (32, {1, 31, 32})):
        async with Quotas(database, clock=lambda days=days: NOON + timedelta(days=days)) as quotas:
            await take(quotas, 1, 1)
            assert await quotas.take("zoe", "images", 1, 1) == QuotaExceeded(1, 0, 11.5 * 3600)
        async with database.reading() as connection:
            left = (await connection.execute(select(quota_day.c.day))).scalars().all()
        assert {(day - NOON.date()).days for day in left} == remembered


async def test_a_store_that_fails_holds_up_nothing(database: Database, file: Path):
    async with quotas_of(database) as quotas:
        taken = await take(quotas, 4, 10)
        with moved_away(file):
            quotas.give_back(taken, 4)
            await quotas.finish()
    assert await used(database) in {0, 4}

"""Images per day: taken whole or not at all, and what was not made comes back, also when nobody waits any more."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from store_parts import moved_away

from server.auth.limits import ImageQuota
from server.errors import ApiError
from server.store import Database, Quotas

NOON = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)


def quotas_of(database: Database) -> Quotas:
    return Quotas(database, clock=lambda: NOON)


async def used(database: Database) -> int:
    return await quotas_of(database).used("zoe", "images")


async def test_what_was_not_made_is_given_back(database: Database):
    async with ImageQuota(quotas_of(database)) as quota:
        taken = await quota.take("zoe", 4, 10)
        assert await used(database) == 4
        quota.give_back("zoe", 3, taken)
        quota.give_back("zoe", 0, taken)
    assert await used(database) == 1


async def test_too_many_are_refused_whole_with_the_numbers_and_the_hour(database: Database):
    async with ImageQuota(quotas_of(database)) as quota:
        await quota.take("zoe", 2, 3)
        with pytest.raises(ApiError) as caught:
            await quota.take("zoe", 2, 3)
        error = caught.value
        assert (error.status, error.code, error.type) == (429, "insufficient_quota", "rate_limit_error")
        assert error.headers == {"x-should-retry": "false"}
        assert "3 images a day and has 1 of them left" in error.message
        assert "in 11 h 30 min" in error.message
        assert "`n`" in error.message
        await quota.take("zoe", 1, 3)
        with pytest.raises(ApiError, match="no images at all"):
            await quota.take("zoe", 1, 0)
    assert await used(database) == 3


async def test_of_many_at_once_exactly_as_many_pass_as_there_are(database: Database):
    async with ImageQuota(quotas_of(database)) as quota:
        outcomes = await asyncio.gather(*(quota.take("zoe", 2, 9) for _ in range(10)), return_exceptions=True)
    assert sum(isinstance(outcome, ApiError) for outcome in outcomes) == 6
    assert await used(database) == 8


async def test_a_caller_who_leaves_while_it_is_taken_has_used_nothing(database: Database):
    for turns in range(12):  # leaves at every point of the way
        async with ImageQuota(quotas_of(database)) as quota:
            taking = asyncio.create_task(quota.take("zoe", 4, 100))
            for _ in range(turns):
                await asyncio.sleep(0)
            if taking.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await taking
            else:
                quota.give_back("zoe", 4, taking.result())
        assert await used(database) == 0


async def test_a_store_that_fails_holds_up_nothing(database: Database, file: Path):
    async with ImageQuota(quotas_of(database)) as quota:
        taken = await quota.take("zoe", 4, 10)
        with moved_away(file):
            quota.give_back("zoe", 4, taken)
            await quota.finish()
    assert await used(database) in {0, 4}

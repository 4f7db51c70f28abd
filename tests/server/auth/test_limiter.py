"""The limits of one key without a server: requests with their tokens, and what is refused from memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from serving import async_poll_until
from store_parts import quota_used

from engine import load_config
from server.auth.metering import KeyLimiter, Limiter
from server.errors import ApiError
from server.store import ApiKey, Buckets, Database, KeyLimits, Quotas

CONFIG = load_config(Path(__file__).parents[3] / "models.yaml")


def key_with(**limits: int) -> ApiKey:
    return ApiKey(
        public_id="a" * 12,
        name="one",
        tier=next(iter(CONFIG.tiers)),
        scopes=frozenset({"chat"}),
        models=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        limits=KeyLimits(**limits),
    )


def is_refused_early(limiter: KeyLimiter) -> bool:
    try:
        limiter.refuse_early()
    except ApiError as error:
        return (error.status, error.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    return False


@pytest.fixture
async def limiter(database: Database) -> AsyncIterator[Limiter]:
    async with Buckets(database) as buckets, Quotas(database) as quotas:
        yield Limiter(CONFIG, buckets, quotas)


async def test_a_key_without_requests_is_refused_from_memory_until_one_has_flowed_back(limiter: Limiter) -> None:
    key = key_with(requests_per_minute=30)
    one = limiter.of(key)
    assert not is_refused_early(one)
    began = time.monotonic()
    while not is_refused_early(one):
        await one.take()
    assert not is_refused_early(limiter.of(key_with(requests_per_minute=31)))  # the limit was raised meanwhile
    assert limiter.of(key) is one
    await async_poll_until(lambda: not is_refused_early(one), 4)
    assert time.monotonic() - began > 1
    await one.take()


async def test_tokens_that_do_not_fit_take_no_request(limiter: Limiter) -> None:
    one = limiter.of(key_with(requests_per_minute=10, tokens_per_minute=100))
    taken, levels = await one.take(60, asked=True)
    assert taken is not None
    assert [(level.limit, level.remaining) for level in levels] == [(10, 9), (100, 40)]
    with pytest.raises(ApiError, match="100 tokens per minute"):
        await one.take(60, asked=True)
    one.give_back(taken, 60)
    _, levels = await one.take(60, asked=True)
    assert levels[0].remaining == 8


async def test_a_request_that_is_charged_afterwards_counts(limiter: Limiter) -> None:
    one = limiter.of(key_with(requests_per_minute=10))
    one.charge()
    _, levels = await one.take()
    assert levels[0].remaining == 8


async def test_a_limit_that_is_changed_meanwhile_holds_for_requests_that_run(limiter: Limiter) -> None:
    one = limiter.of(key_with(parallel_requests=1))
    one.begin()
    with pytest.raises(ApiError, match="running at the same time"):
        one.begin()
    limiter.of(key_with(parallel_requests=2)).begin()
    assert one.running == 2


async def test_too_many_images_are_refused_whole_with_the_numbers_and_the_hour(database: Database) -> None:
    noon = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
    async with Buckets(database) as buckets, Quotas(database, clock=lambda: noon) as quotas:
        limiter = Limiter(CONFIG, buckets, quotas)
        one = limiter.of(key_with(images_per_day=3))
        await one.take_images(2)
        with pytest.raises(ApiError) as caught:
            await one.take_images(2)
        error = caught.value
        assert (error.status, error.code, error.type) == (429, "insufficient_quota", "rate_limit_error")
        assert error.headers == {"x-should-retry": "false"}
        assert "3 images a day and has 1 of them left" in error.message
        assert "in 11 h 30 min" in error.message
        assert "`n`" in error.message
        await one.take_images(1)
        with pytest.raises(ApiError, match="no images at all"):
            await limiter.of(key_with(images_per_day=0)).take_images(1)
    assert await quota_used(database, one.key.public_id) == 3

"""The limits of one key without a server: requests with their tokens, and what is refused from memory."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from serving import async_poll_until

from engine import load_config
from server.auth.limits import Limiter
from server.errors import ApiError
from server.store import ApiKey, Buckets, Database, KeyLimits

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


def is_refused_early(limiter: Limiter, key: ApiKey) -> bool:
    try:
        limiter.refuse_early(key)
    except ApiError as error:
        return (error.status, error.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    return False


async def test_a_key_without_requests_is_refused_from_memory_until_one_has_flowed_back(database: Database) -> None:
    async with Buckets(database) as buckets:
        limiter, key = Limiter(CONFIG, buckets), key_with(requests_per_minute=30)
        assert not is_refused_early(limiter, key)
        began = time.monotonic()
        while not is_refused_early(limiter, key):
            await limiter.take(key)
        assert not is_refused_early(limiter, key_with(requests_per_minute=31))  # the limit was raised meanwhile
        await async_poll_until(lambda: not is_refused_early(limiter, key), 4)
        assert time.monotonic() - began > 1
        await limiter.take(key)


async def test_tokens_that_do_not_fit_take_no_request(database: Database) -> None:
    async with Buckets(database) as buckets:
        limiter, key = Limiter(CONFIG, buckets), key_with(requests_per_minute=10, tokens_per_minute=100)
        taken, levels = await limiter.take(key, 60, asked=True)
        assert taken is not None
        assert [(level.limit, level.remaining) for level in levels] == [(10, 9), (100, 40)]
        with pytest.raises(ApiError, match="100 tokens per minute"):
            await limiter.take(key, 60, asked=True)
        limiter.give_back(taken, 60)
        _, levels = await limiter.take(key, 60, asked=True)
        assert levels[0].remaining == 8


async def test_a_request_that_is_charged_afterwards_counts(database: Database) -> None:
    async with Buckets(database) as buckets:
        limiter, key = Limiter(CONFIG, buckets), key_with(requests_per_minute=10)
        limiter.charge(key)
        _, levels = await limiter.take(key)
        assert levels[0].remaining == 8

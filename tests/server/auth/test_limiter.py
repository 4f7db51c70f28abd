"""The limits of one key without a server: what is taken, what is refused, and what comes back."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from store_parts import quota_used

from engine import load_config
from server.auth.metering import KeyLimiter, Meter
from server.errors import ApiError
from server.observability.metrics import Metrics
from server.store.database import Database
from server.store.keys import ApiKey, KeyLimits
from server.store.limits import Buckets, Quotas, Replicas
from server.store.usage import UsageBook

CONFIG = load_config(Path(__file__).parents[3] / "models.yaml")


def of(meter: Meter, tier: str = next(iter(CONFIG.tiers)), **limits: int) -> KeyLimiter:
    """The meter of a key with these limits of its own."""
    key = ApiKey(
        public_id="a" * 12,
        name="one",
        tier=tier,
        scopes=frozenset({"chat"}),
        models=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        limits=KeyLimits(**limits),
    )
    return meter.of(key.public_id, key.limits_in(CONFIG.tiers))


@pytest.fixture
async def meter(database: Database) -> AsyncIterator[Meter]:
    async with Buckets(database) as buckets, Quotas(database) as quotas:
        yield Meter(buckets, quotas, UsageBook(database), Metrics(()), Replicas(database))


async def test_requests_and_tokens_are_counted_apart_and_what_is_refused_takes_nothing(meter: Meter) -> None:
    one = of(meter, requests_per_minute=10, tokens_per_minute=10)  # one comes back after six seconds, a slow database's
    left = await one.take_request()
    assert left is not None
    assert (left.limit, left.remaining) == (10, 9)
    taken = await one.take_tokens(6, asked=True)
    assert taken is not None
    assert (taken[1].limit, taken[1].remaining) == (10, 4)
    with pytest.raises(ApiError, match="10 tokens per minute") as caught:
        await one.take_tokens(6, asked=True)
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "4"
    one.give_back(taken[0], 6)
    assert await one.take_tokens(6, asked=True)
    with pytest.raises(ApiError, match="may need 11 tokens"):
        await one.take_tokens(11, asked=True)


async def test_a_request_that_is_refused_learns_how_many_tokens_are_left(meter: Meter) -> None:
    one = of(meter, requests_per_minute=1, tokens_per_minute=10)
    await one.take_request()
    await one.take_tokens(6, asked=True)
    for _ in range(2):
        with pytest.raises(ApiError, match="1 requests per minute") as caught:
            await one.take_request()
        assert caught.value.headers["x-ratelimit-remaining-requests"] == "0"
        assert caught.value.headers["x-ratelimit-remaining-tokens"] == "4"
        assert caught.value.headers["x-ratelimit-limit-tokens"] == "10"


async def test_what_has_no_limit_takes_nothing(meter: Meter) -> None:
    one = of(meter, tier="no longer in models.yaml")
    assert await one.take_request() is None
    assert await one.take_tokens(10**9, asked=True) is None
    assert await one.take_images(10**9) is None


async def test_a_limit_that_is_changed_meanwhile_holds_for_requests_that_run(meter: Meter) -> None:
    one = of(meter, parallel_requests=1)
    one.begin()
    with pytest.raises(ApiError, match="running at the same time"):
        one.begin()
    of(meter, parallel_requests=2).begin()
    assert one.running == 2


async def test_too_many_images_are_refused_whole_with_the_numbers_and_the_hour(database: Database) -> None:
    noon = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
    async with Buckets(database) as buckets, Quotas(database, clock=lambda: noon) as quotas:
        meter = Meter(buckets, quotas, UsageBook(database), Metrics(()), Replicas(database))
        one = of(meter, images_per_day=3)
        await one.take_images(2)
        with pytest.raises(ApiError) as caught:
            await one.take_images(2)
        error = caught.value
        assert (error.status, error.code, error.body()["type"]) == (429, "insufficient_quota", "rate_limit_error")
        assert error.headers == {"x-should-retry": "false"}
        assert "3 images a day and has 1 left" in error.message
        assert "in 11 h 30 min" in error.message
        assert "`n`" in error.message
        await one.take_images(1)
        with pytest.raises(ApiError, match="no images at all"):
            await of(meter, images_per_day=0).take_images(1)
    assert await quota_used(database, one.key) == 3

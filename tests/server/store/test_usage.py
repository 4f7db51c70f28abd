"""Usage per key, model and hour, and quotas per day, on both databases."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from store_parts import held, quota_used

from server.store import StoreUnavailableError
from server.store.database import Database
from server.store.limits import QuotaExceeded, Quotas, QuotaTaken
from server.store.usage import Usage, UsageBook

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
ONE = Usage(requests=1, prompt_tokens=10, completion_tokens=5, cached_tokens=4)


async def whole(book: UsageBook) -> Usage:
    rows = await book.read(NOON - 365 * DAY, NOON + 365 * DAY, group_by=())
    assert len(rows) == 1
    return rows[0].usage


async def test_requests_of_an_hour_become_one_sum_per_key_model_and_kind(database: Database) -> None:
    async with UsageBook(database) as book:
        for _ in range(3):
            book.add("key1", "plus", "chat", ONE, NOON)
        book.add("key1", "plus", "chat", Usage(requests=1, errors=1, aborted=1), NOON + HOUR - timedelta(seconds=1))
        book.add("key2", "draw", "images", Usage(requests=1, images=2), NOON + HOUR)
        book.add("key2", "talk", "audio", Usage(requests=1, audio_seconds=1.5), NOON + HOUR)
        await book.flush()
        book.add("key2", "talk", "audio", Usage(requests=1, audio_seconds=1.5), NOON + HOUR)
        await book.flush()
        rows = await book.read(NOON, NOON + DAY, group_by=("hour", "key", "model", "kind"))
    assert [(row.start, row.key, row.model, row.kind, row.usage) for row in rows] == [
        (NOON, "key1", "plus", "chat", Usage(4, 30, 15, 12, errors=1, aborted=1)),
        (NOON + HOUR, "key2", "draw", "images", Usage(requests=1, images=2)),
        (NOON + HOUR, "key2", "talk", "audio", Usage(requests=2, audio_seconds=3.0)),
    ]


async def test_sums_are_read_by_day_key_and_model_within_a_time(database: Database) -> None:
    async with UsageBook(database) as book:
        for hours in range(48):
            book.add("key1", "plus" if hours % 2 else "pro", "chat", ONE, NOON + hours * HOUR)
        await book.flush()
        days = await book.read(NOON, NOON + 3 * DAY)
        assert [(row.start, row.usage.requests) for row in days] == [
            (datetime(2026, 11, 21 + day, tzinfo=UTC), count) for day, count in enumerate((12, 24, 12))
        ]
        assert (days[0].key, days[0].model, days[0].kind) == (None, None, None)
        [plus] = await book.read(NOON, NOON + 3 * DAY, model="plus", key="key1", group_by=("model",))
        assert (plus.model, plus.start, plus.usage.requests) == ("plus", None, 24)
        assert await book.read(NOON, NOON + 3 * DAY, key="nobody") == []
        within = await book.read(NOON + timedelta(minutes=30), NOON + 2 * HOUR, group_by=("hour",))
        assert [row.start for row in within] == [NOON, NOON + HOUR]
        assert len(await book.read(NOON, NOON + timedelta(hours=2, seconds=1), group_by=("hour",))) == 3


async def test_large_sums_stay_exact(database: Database) -> None:
    async with UsageBook(database) as book:
        for hours in range(3):
            book.add("key1", "plus", "chat", Usage(prompt_tokens=2**53 + 1), NOON + hours * HOUR)
        await book.flush()
        assert (await whole(book)).prompt_tokens == 3 * (2**53 + 1)


async def test_nothing_is_lost_or_doubled_when_several_books_write_at_once(database: Database) -> None:
    books = [UsageBook(database) for _ in range(4)]
    for _ in range(5):
        for book in books:
            for key in range(30):
                book.add(f"key{key}", "plus", "chat", ONE, NOON)
        await asyncio.gather(*(book.flush() for book in [*books, *books]))
    assert (await whole(books[0])).requests == 5 * 4 * 30


async def test_usage_is_written_by_itself_in_time_and_at_the_end(database: Database) -> None:
    reader = UsageBook(database)
    async with UsageBook(database, flush_every_seconds=0.01) as book, asyncio.timeout(60):
        book.add("key1", "plus", "chat", ONE, NOON)
        while await reader.read(NOON, NOON + DAY) == []:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)
    async with UsageBook(database, flush_every_seconds=3600) as book:
        book.add("key1", "plus", "chat", ONE, NOON)
    assert await whole(reader) == ONE + ONE


async def test_a_caller_that_leaves_a_flush_neither_loses_nor_doubles_it(database: Database) -> None:
    async with UsageBook(database) as book:
        for count in range(1, 6):
            book.add("key1", "plus", "chat", ONE, NOON)
            flushing = asyncio.create_task(book.flush())
            for _ in range(count):
                await asyncio.sleep(0)
            flushing.cancel()
    assert (await whole(book)).requests == 5


async def test_usage_outlives_a_locked_database_bounded(
    file: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    book = UsageBook(database, max_lines=10)
    with held(file):
        for hours in range(30):
            book.add("key1", "plus", "chat", ONE, NOON + hours * HOUR)
        with pytest.raises(StoreUnavailableError):
            await book.flush()
        await book.close()  # says so, and does not fail
    assert "usage of 20 key-hours is lost" in caplog.text
    assert "usage in 10 lines is not written yet" in caplog.text
    await book.flush()
    rows = await book.read(NOON, NOON + 3 * DAY, group_by=("hour",))
    assert [row.start for row in rows] == [NOON + hours * HOUR for hours in range(20, 30)]


# Quotas


async def test_a_quota_is_exact_for_many_at_once_and_anew_at_midnight_utc(database: Database) -> None:
    now = datetime(2026, 11, 21, 23, 59, 0, tzinfo=UTC)
    quotas = [Quotas(database, lambda: now) for _ in range(2)]
    answers = await asyncio.gather(*(quotas[number % 2].take("key1", "images", 2, 21) for number in range(40)))
    assert sum(isinstance(answer, QuotaTaken) for answer in answers) == 10
    assert await quotas[0].take("key1", "images", 2, 21) == QuotaExceeded(21, 1, 60)
    assert await quotas[0].take("key1", "images", 1, 21) == QuotaTaken("key1", "images", 1, now.date())
    assert isinstance(await quotas[0].take("key2", "images", 1, 21), QuotaTaken)
    assert isinstance(await quotas[0].take("key1", "songs", 1, 21), QuotaTaken)
    now += timedelta(minutes=1)
    assert await quotas[0].take("key1", "images", 4, 21) == QuotaTaken("key1", "images", 4, now.date())


async def test_unused_quota_goes_back_to_its_day_and_never_below_zero(database: Database) -> None:
    async with Quotas(database, lambda: NOON) as quotas:
        taken = await quotas.take("key1", "images", 4, 5)
        assert isinstance(taken, QuotaTaken)
        for unused, left in ((0, 4), (3, 1), (3, 0)):
            quotas.give_back(taken, unused)
            await quotas.finish()
            assert await quota_used(database, "key1") == left
        await quotas.take("key1", "images", 4, 5)
        quotas.give_back(replace(taken, day=NOON.date() - DAY), 3)
    assert await quota_used(database, "key1") == 4


async def test_a_quota_of_nothing_and_a_first_wish_above_it_are_refused(database: Database) -> None:
    quotas = Quotas(database, lambda: NOON)
    assert await quotas.take("key1", "images", 1, 0) == QuotaExceeded(0, 0, 12 * 3600)
    assert await quotas.take("key1", "images", 6, 5) == QuotaExceeded(5, 5, 12 * 3600)
    await quotas.take("key1", "images", 4, 5)
    # The tier was changed in the middle of the day
    assert await quotas.take("key1", "images", 1, 3) == QuotaExceeded(3, 0, 12 * 3600)


async def test_old_days_are_forgotten(database: Database) -> None:
    await Quotas(database, lambda: NOON - 40 * DAY).take("key1", "images", 1, 5)
    await Quotas(database, lambda: NOON).take("key1", "images", 1, 5)
    assert await quota_used(database, "key1") == 1

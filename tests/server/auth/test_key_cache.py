"""The key cache: freshness, outages and last-used dates, on a real database behind real locks."""

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest
from store_parts import held, moved_away, run_python

from server.store import StoreUnavailableError
from server.store.database import Database
from server.store.key_cache import KeyCache
from server.store.keys import ApiKey, KeyStore, ParsedKey, new_key
from server.store.sqlite import sqlite_url


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class GatedStore(KeyStore):
    """The real store behind a gate, to hold a lookup open; counts lookups."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.recorded = asyncio.Event()
        self.lookups = 0

    async def check(self, presented: ParsedKey) -> ApiKey | None:
        self.lookups += 1
        self.asked.set()
        await self.gate.wait()
        return await super().check(presented)

    async def record_use(self, last_used_at: Mapping[str, datetime]) -> None:
        await super().record_use(last_used_at)
        if last_used_at:
            self.recorded.set()


async def test_a_key_revoked_by_another_process_stops_working_after_the_ttl(file: Path, database: Database) -> None:
    clock = Clock()
    text, key = await KeyStore(database).create("laptop", "standard")
    async with KeyCache(KeyStore(database), ttl_seconds=5, clock=clock) as cache:
        assert await cache.authenticate(text) == key
        program = (
            "import asyncio, sys; from server.store.database import Database; from server.store.keys import KeyStore\n"
            "async def main():\n"
            "    async with await Database.open(sys.argv[1]) as database:\n"
            "        await KeyStore(database).revoke(sys.argv[2])\n"
            "asyncio.run(main())"
        )
        await asyncio.to_thread(run_python, program, sqlite_url(file), key.public_id)
        clock.seconds += 4.9
        assert await cache.authenticate(text) == key
        clock.seconds += 0.2
        assert await cache.authenticate(text) is None


async def test_with_the_database_locked_known_keys_work_and_unknown_ones_are_unavailable(file: Path) -> None:
    clock = Clock()
    async with await Database.open(sqlite_url(file)) as before:
        text, key = await KeyStore(before).create("laptop", "standard")
        cache = KeyCache(KeyStore(before), clock=clock)
        assert await cache.authenticate(text) == key
        await cache.flush()
    async with await Database.open(sqlite_url(file), busy_timeout_seconds=0.05) as database:
        cache.store = KeyStore(database)  # its connections are not open yet, so the lock keeps it out
        clock.seconds += 6
        with held(file, "PRAGMA locking_mode = EXCLUSIVE"):
            assert await cache.authenticate(text) == key
            with pytest.raises(StoreUnavailableError, match="locked"):
                await cache.authenticate(new_key())
        await cache.close()


async def test_a_known_key_works_through_an_outage_for_its_stale_time_and_not_longer(
    file: Path, database: Database
) -> None:
    clock = Clock()
    text, key = await KeyStore(database).create("laptop", "standard")
    async with KeyCache(KeyStore(database), clock=clock, stale_seconds=300) as cache:
        assert await cache.authenticate(text) == key
        with moved_away(file):
            for _ in range(30):
                clock.seconds += 10
                assert await cache.authenticate(text) == key
            clock.seconds += 10
            with pytest.raises(StoreUnavailableError, match="removed or replaced"):
                await cache.authenticate(text)
        assert await cache.authenticate(text) == key


async def test_during_an_outage_one_request_per_ttl_waits_for_the_store(file: Path, database: Database) -> None:
    clock = Clock()
    store = GatedStore(database)
    text, _ = await store.create("laptop", "standard")
    async with KeyCache(store, clock=clock) as cache:
        await cache.authenticate(text)
        clock.seconds += 6
        with moved_away(file):
            for _ in range(5):
                assert await cache.authenticate(text)
        assert store.lookups == 2


async def test_a_slow_lookup_does_not_hold_up_a_known_key_and_its_late_answer_counts(
    database: Database,
) -> None:
    clock = Clock()
    store = GatedStore(database)
    text, key = await store.create("laptop", "standard")
    async with KeyCache(store, clock=clock) as cache:
        assert await cache.authenticate(text) == key
        cache.lookup_timeout_seconds = 0.02  # from here on the store answers when it is told to
        await store.revoke(key.public_id)
        clock.seconds += 6
        store.gate.clear()
        assert await cache.authenticate(text) == key
        with pytest.raises(StoreUnavailableError):
            await cache.authenticate(new_key())
        lookups = list(cache._lookups.values())
        store.gate.set()
        await asyncio.wait(lookups)
        assert await cache.authenticate(text) is None


async def test_requests_with_one_key_share_one_lookup_even_when_the_first_leaves(database: Database) -> None:
    store = GatedStore(database)
    text, key = await store.create("laptop", "standard")
    async with KeyCache(store) as cache:
        store.gate.clear()
        store.asked.clear()
        callers = [asyncio.create_task(cache.authenticate(text)) for _ in range(50)]
        await store.asked.wait()
        callers[0].cancel()
        store.gate.set()
        answers = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [key] * 49
    assert store.lookups == 1


async def test_an_unknown_key_is_remembered_for_its_own_shorter_time(database: Database) -> None:
    clock = Clock()
    store = GatedStore(database)
    text = new_key()
    async with KeyCache(store, unknown_ttl_seconds=1, clock=clock) as cache:
        assert [await cache.authenticate(text) for _ in range(3)] == [None] * 3
        assert store.lookups == 1
        clock.seconds += 1.1
        assert await cache.authenticate(text) is None
        assert store.lookups == 2


async def test_text_that_is_no_key_never_reaches_the_database(database: Database) -> None:
    store = GatedStore(database)
    async with KeyCache(store) as cache:
        for text in ("", "sk-abc", "hk_" + "x" * 62, "\ud800", "\0" * 65):
            assert await cache.authenticate(text) is None
    assert store.lookups == 0


async def test_the_cache_is_bounded_and_invented_keys_do_not_push_out_real_ones(database: Database) -> None:
    store = GatedStore(database)
    texts = [(await store.create(f"key {number}", "standard"))[0] for number in range(4)]
    async with KeyCache(store, max_entries=3) as cache:
        for text in texts:
            assert await cache.authenticate(text)
        for _ in range(20):
            assert await cache.authenticate(new_key()) is None
        lookups = store.lookups
        for text in texts[1:]:
            assert await cache.authenticate(text)
        assert store.lookups == lookups
        assert await cache.authenticate(texts[0])
        assert store.lookups == lookups + 1
        assert (len(cache._known), len(cache._unknown)) == (3, 3)


async def test_last_use_is_written_in_a_batch_and_at_the_end_never_by_a_request(database: Database) -> None:
    store = KeyStore(database)
    text, _ = await store.create("laptop", "standard")
    async with KeyCache(store) as cache:
        await cache.authenticate(text)
        assert [key.last_used_at for key in await store.list()] == [None]
        await cache.flush()
        [first] = [key.last_used_at for key in await store.list()]
        assert first is not None
        await cache.authenticate(text)
    [second] = [key.last_used_at for key in await store.list()]
    assert second is not None
    assert second > first


async def test_last_use_is_written_by_itself_in_time(database: Database) -> None:
    store = GatedStore(database)
    text, _ = await store.create("laptop", "standard")
    async with asyncio.timeout(60), KeyCache(store, flush_every_seconds=0.01) as cache:
        await cache.authenticate(text)
        await store.recorded.wait()
        assert (await store.list())[0].last_used_at is not None


async def test_last_use_outlives_a_locked_database(
    file: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(database)
    text, _ = await store.create("laptop", "standard")
    cache = KeyCache(store)
    await cache.authenticate(text)
    with held(file):
        with pytest.raises(StoreUnavailableError):
            await cache.flush()
        await cache.close()  # says so, and does not fail
    assert "last-used dates of 1 keys are not written yet" in caplog.text
    await cache.flush()
    assert (await store.list())[0].last_used_at is not None


async def test_no_log_line_and_no_error_holds_a_secret(
    file: Path, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = KeyStore(database)
    text, key = await store.create("laptop", "standard")
    errors: list[BaseException] = []
    async with KeyCache(store) as cache:
        await cache.authenticate(text)
        await cache.authenticate(text[:-1] + "!")
        assert text not in repr(cache)
        cache._known.clear()
        with moved_away(file):
            try:
                await cache.authenticate(text)
            except StoreUnavailableError as error:
                errors.append(error)
    with held(file):
        try:
            await store.revoke(key.public_id)
        except StoreUnavailableError as error:
            errors += [error, error.__cause__ or error]
    assert len(errors) == 3
    written = caplog.text + "".join(f"{error!r} {error}" for error in errors)
    assert key.public_id in written
    assert text.split("_")[2][:20] not in written

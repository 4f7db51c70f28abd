"""Sessions of the page in the store and in memory: two halves, their ends, links that work once, and failed sign-ins."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from store_parts import held

from server.auth.sessions import Halves, OnceLinks, Sessions, SignIns
from server.errors import ApiError
from server.store.audit import read_entries
from server.store.database import Database
from server.store.key_cache import KeyCache
from server.store.keys import LONGEST_SESSION, SESSION_IDLE, SESSIONS_PER_KEY, ApiKey, KeyStore, SessionStore


class Clock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_(self, time: timedelta) -> None:
        self.now += time


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def parts(database: Database) -> tuple[SessionStore, KeyStore, Clock, ApiKey]:
    clock = Clock()
    keys = KeyStore(database, clock)
    _, key = await keys.create("laptop", "standard")
    return SessionStore(database, keys, clock), keys, clock, key


async def test_both_halves_of_one_session_are_its_key_and_nothing_less_is(database: Database):
    store, _, _, key = await parts(database)
    one, other = await store.create(key, "10.0.0.1"), await store.create(key, "10.0.0.1")
    assert await store.check(*one) == await store.check(*other) == key
    for half, token in [(one[0], other[1]), (other[0], one[1]), (one[0], one[0]), (one[1], one[0]), ("", "")]:
        assert await store.check(half, token) is None
    entry = (await read_entries(database, 1))[0]
    assert (entry.action, entry.actor, entry.origin) == ("console.login", key.public_id, "10.0.0.1")


async def test_nothing_on_disk_can_sign_in(database: Database):
    store, _, _, key = await parts(database)
    halves = await store.create(key, "here")
    async with database.reading() as connection:
        rows = str((await connection.exec_driver_sql("SELECT * FROM console_session")).all())
    assert not any(half in rows for half in halves)


async def test_a_session_goes_on_while_nothing_can_be_written(file: Path, database: Database):
    store, _, clock, key = await parts(database)
    halves = await store.create(key, "here")
    clock.pass_(timedelta(minutes=5))
    with held(file, "PRAGMA busy_timeout = 5000"):
        assert await store.check(*halves) == key


async def test_a_session_ends_when_it_was_not_used_for_long_and_after_a_week(database: Database):
    store, _, clock, key = await parts(database)
    idle, used = await store.create(key, "here"), await store.create(key, "here")
    for _ in range(int(LONGEST_SESSION / SESSION_IDLE) * 2 - 1):
        clock.pass_(SESSION_IDLE / 2)
        assert await store.check(*used) is not None
    assert await store.check(*idle) is None
    clock.pass_(SESSION_IDLE / 2)
    assert await store.check(*used) is None


async def test_the_oldest_sessions_of_a_key_end_where_there_are_many(database: Database):
    store, keys, clock, key = await parts(database)
    _, neighbour = await keys.create("neighbour", "standard")
    theirs, made = await store.create(neighbour, "here"), []
    for _ in range(SESSIONS_PER_KEY + 2):
        clock.pass_(timedelta(seconds=1))
        made.append(await store.create(key, "here"))
    found = [await store.check(*one) is not None for one in made]
    assert found == [False] * 2 + [True] * SESSIONS_PER_KEY
    assert await store.check(*theirs) == neighbour


async def test_a_session_is_refused_once_its_key_is_revoked_or_has_expired(database: Database):
    store, keys, clock, key = await parts(database)
    _, expiring = await keys.create("a day", "standard", expires_at=clock.now + timedelta(hours=1))
    one, other = await store.create(key, "here"), await store.create(expiring, "here")
    await keys.revoke(key.public_id)
    assert await store.check(*one) is None
    clock.pass_(timedelta(hours=2))
    assert await store.check(*other) is None


async def test_a_session_that_was_ended_is_refused_at_once(database: Database):
    store, keys, _, key = await parts(database)
    async with KeyCache(keys) as cache:
        sessions = Sessions(store, cache)
        halves = await sessions.begin(key, "here")
        assert await sessions.key_of(halves) == key
        assert await sessions.key_of(Halves("", "")) is None
        await sessions.end(halves)
        assert await sessions.key_of(halves) is None


def test_a_link_signs_in_once_and_for_ten_minutes():
    clock = Seconds()
    links = OnceLinks(clock)
    first, second = links.make("abcdefghijkl"), links.make("abcdefghijkl")
    assert links.use("x" * 43) is None
    assert links.use(first) == "abcdefghijkl"
    assert links.use(first) is None
    clock.now = 601
    assert links.use(second) is None


def test_an_address_that_fails_too_often_has_to_wait_and_no_other():
    clock = Seconds()
    sign_ins = SignIns(clock)
    for _ in range(10):
        sign_ins.check("10.0.0.1")
        sign_ins.failed("10.0.0.1")
    with pytest.raises(ApiError) as refused:
        sign_ins.check("10.0.0.1")
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "60")
    sign_ins.check("10.0.0.2")
    clock.now = 61
    sign_ins.check("10.0.0.1")


def test_failed_sign_ins_of_many_addresses_take_little_memory():
    sign_ins = SignIns(Seconds())
    for number in range(5000):
        sign_ins.failed(f"address {number}")
    assert len(sign_ins._failed) == 4096

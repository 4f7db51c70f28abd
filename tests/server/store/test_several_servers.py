"""Servers of one PostgreSQL know what the others run, until they end or are gone, and sign with one key."""

from collections.abc import AsyncIterator

import pytest
from postgres_parts import Postgres
from serving import async_poll_until
from sqlalchemy import text

from server.store.database import Database, shared_key
from server.store.limits import Replicas


@pytest.fixture
async def shared(postgres: Postgres) -> AsyncIterator[Database]:
    async with await Database.open(postgres.new_schema()) as opened:
        yield opened


async def test_requests_that_run_on_one_server_count_on_the_other_within_a_second(shared: Database):
    async with Replicas(shared, "one") as one, Replicas(shared, "two") as two:
        one.running["key"] = 3
        await async_poll_until(lambda: two.elsewhere("key") == 3, 3)
        assert one.elsewhere("key") == 0
        one.running["key"] = 0
        await async_poll_until(lambda: two.elsewhere("key") == 0, 3)
        one.running["key"] = 2
        await async_poll_until(lambda: two.elsewhere("key") == 2, 3)
        await one.close()
        await async_poll_until(lambda: two.elsewhere("key") == 0, 3)


async def test_what_a_dead_server_ran_counts_for_five_seconds(shared: Database):
    dead, alive = Replicas(shared, "dead"), Replicas(shared, "alive")
    dead.running["key"] = 1
    await dead.flush()
    await alive.flush()
    assert alive.elsewhere("key") == 1
    async with shared.writing() as connection:
        await connection.execute(text("UPDATE replica SET renewed_at = renewed_at - 6 WHERE id LIKE 'dead-%'"))
    await alive.flush()
    assert alive.elsewhere("key") == 0


async def test_the_first_servers_key_is_everybodys(shared: Database):
    assert await shared_key(shared, "links", b"1" * 32) == b"1" * 32
    assert await shared_key(shared, "links", b"2" * 32) == b"1" * 32
    assert await shared_key(shared, "other", b"2" * 32) == b"2" * 32


async def test_with_sqlite_nothing_is_written(database: Database):
    async with Replicas(database) as alone:
        alone.running["key"] = 1
        assert alone.elsewhere("key") == 0
    async with database.reading() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM replica"))).scalar_one() == 0

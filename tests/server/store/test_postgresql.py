"""What is special about a PostgreSQL database: wrong ones, outages, passwords."""

import asyncio
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from postgres_parts import PASSWORD, Postgres
from sqlalchemy.engine import make_url

from server.store import StoreError, StoreUnavailableError
from server.store.database import Database
from server.store.key_cache import KeyCache
from server.store.keys import KeyStore, new_key
from server.store.limits import Ask, Buckets, Level
from server.store.schema import utc_now
from server.store.usage import Usage, UsageBook


async def refused(url: str) -> str:
    with pytest.raises(StoreError) as caught:
        await Database.open(url)
    assert not isinstance(caught.value, StoreUnavailableError)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    return caught.value.message


async def test_a_server_that_is_down_or_refuses_is_named_with_the_remedy(postgres: Postgres) -> None:
    url = make_url(postgres.new_database())
    nowhere = url.set(query={}, host="127.0.0.1", port=1).render_as_string(hide_password=False)
    assert "Check that the server runs" in await refused(nowhere)
    assert "no_such_database" in await refused(postgres.url("no_such_database"))
    assert "password authentication failed" in await refused(postgres.url("postgres", password="wrong"))
    # Where the server's words hold the password, they are left out
    telling = await refused(postgres.url("postgres", user="nobody-here", password="nobody-here"))
    assert "nobody-here" not in telling


async def test_the_database_of_another_program_is_refused(postgres: Postgres) -> None:
    url = postgres.new_database()
    postgres.execute("CREATE TABLE bookmarks (url TEXT)", database=make_url(url).database or "")
    assert "another program" in await refused(url)


async def test_a_database_of_a_newer_release_is_refused(postgres: Postgres) -> None:
    url = postgres.new_database()
    async with await Database.open(url):
        pass
    postgres.execute("UPDATE hearth_schema SET version_num = '9999'", database=make_url(url).database or "")
    assert "newer release" in await refused(url)


async def test_a_database_without_unicode_is_refused(postgres: Postgres) -> None:
    url = postgres.new_database("ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    assert "ENCODING 'UTF8'" in await refused(url)


async def test_a_user_who_may_not_create_tables_is_told_how_to_get_the_right(postgres: Postgres) -> None:
    database = make_url(postgres.new_database()).database or ""
    postgres.execute(f"CREATE ROLE guest_{database} LOGIN PASSWORD '{PASSWORD}'")
    message = await refused(postgres.url(database, user=f"guest_{database}"))
    assert f'ALTER DATABASE "{database}" OWNER TO "guest_{database}"' in message


async def test_a_read_only_server_is_refused(postgres: Postgres) -> None:
    url = postgres.new_database()
    postgres.execute(f"ALTER DATABASE {make_url(url).database} SET default_transaction_read_only = on")
    assert "read-only" in await refused(url)


async def test_a_backup_is_left_to_pg_dump(postgres: Postgres, tmp_path: Path) -> None:
    async with await Database.open(postgres.new_database()) as database:
        with pytest.raises(StoreError, match="pg_dump"):
            await database.backup(tmp_path / "copy")


class Outage:
    """The server stopped at once, as in a crash; started again at the end."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def __aenter__(self) -> None:
        await asyncio.to_thread(self._postgres.stop)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._postgres.start)


async def test_through_an_outage_known_keys_work_usage_is_kept_and_all_goes_on_after_it(
    postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seconds = 1000.0
    clock: Callable[[], float] = lambda: seconds  # noqa: E731 - reads the variable of this test
    ask = Ask("k", 1, 60)
    async with await Database.open(postgres.new_database()) as database:
        store = KeyStore(database)
        text, key = await store.create("laptop", "standard")
        async with KeyCache(store, clock=clock) as cache, Buckets(database) as buckets, UsageBook(database) as book:
            assert await cache.authenticate(text) == key
            assert isinstance(await buckets.take(ask), Level)
            async with Outage(postgres):
                seconds += 6
                book.add("key1", "plus", "chat", Usage(requests=1))
                assert await cache.authenticate(text) == key
                failing = [
                    cache.authenticate(new_key()),
                    store.create("tablet", "standard"),
                    buckets.take(ask),
                    book.flush(),
                ]
                errors = await asyncio.gather(*failing, return_exceptions=True)
                assert [type(error) for error in errors] == [StoreUnavailableError] * 4
            seconds += 6
            assert await cache.authenticate(text) == await store.find(key.public_id)
            assert isinstance(await buckets.take(ask), Level)
            await book.flush()
            assert [row.usage.requests for row in await book.read(utc_now(), utc_now())] == [1]
    told = "".join("".join(traceback.format_exception(error)) for error in errors if isinstance(error, Exception))
    assert PASSWORD not in told + caplog.text


async def test_a_server_restarted_between_two_calls_is_not_noticed(postgres: Postgres) -> None:
    async with await Database.open(postgres.new_database()) as database, Buckets(database) as buckets:
        store = KeyStore(database)
        await store.create("laptop", "standard")
        assert isinstance(await buckets.take(Ask("k", 1, 60)), Level)
        async with Outage(postgres):
            pass
        await store.create("tablet", "standard")
        answer = await buckets.take(Ask("k", 1, 60))
        assert isinstance(answer, Level)


async def test_a_connection_that_its_driver_has_given_up_is_replaced(postgres: Postgres) -> None:
    async with await Database.open(postgres.new_database()) as database, Buckets(database) as buckets:
        store = KeyStore(database)
        await store.create("laptop", "standard")
        assert isinstance(await buckets.take(Ask("k", 1, 60)), Level)
        for line in list(database._place._lines):
            line.pgconn.finish()
        await store.create("tablet", "standard")
        assert isinstance(await buckets.take(Ask("k", 1, 60)), Level)

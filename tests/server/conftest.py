"""Databases for the tests of the store: each such test runs on SQLite and on PostgreSQL, unless it looks into `file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from postgres_parts import Postgres, missing_reason

from server.store import Database, sqlite_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database_kind" in metafunc.fixturenames:
        kinds = ["sqlite"] if "file" in metafunc.fixturenames else ["sqlite", "postgresql"]
        metafunc.parametrize("database_kind", kinds)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "hearth.db"


@pytest.fixture
def database_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if database_kind == "sqlite":
        return sqlite_url(tmp_path / "data" / "hearth.db")
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.new_schema()


@pytest.fixture
async def database(database_url: str, database_kind: str) -> AsyncIterator[Database]:
    """Gives up soon where a test holds a lock on the file."""
    busy_timeout_seconds = 0.05 if database_kind == "sqlite" else 5
    async with await Database.open(database_url, busy_timeout_seconds=busy_timeout_seconds) as database:
        yield database

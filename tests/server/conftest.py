"""Databases, and a small server beside the one with all demo models.

Each test of a database runs on SQLite and on PostgreSQL, unless it looks into `file`.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import bucket_server
import pytest
from collector import Collector
from postgres_parts import Postgres, missing_reason
from serving import Server
from small_models import LIMITED_CHAT

from server.store.database import Database
from server.store.sqlite import sqlite_url


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


@pytest.fixture(scope="session")
def bucket_environment() -> Iterator[dict[str, str]]:
    """A bucket that speaks S3, named bucket_server.NAME: what a program needs in its environment to reach it."""
    if why := bucket_server.missing_reason():
        pytest.skip(why)
    with bucket_server.running() as environment:
        yield environment


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the traces of `chat_server`."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """One chat model, tiers with small limits, proxies on this machine that are trusted, and traces."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "models.yaml").write_text(LIMITED_CHAT)
    environment = {
        "HEARTH_MODELS": str(folder / "models.yaml"),
        "HEARTH_TRUSTED_PROXIES": "127.0.0.1",
        "HEARTH_CORS_ORIGINS": "https://chat.example.org",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.endpoint,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",  # vLLM has another default
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_SERVICE_NAME": "hearth-test",
    }
    with Server(folder, environment=environment) as running:
        yield running
        assert running.stop() == 0, running.log()


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
    """Gives up soon where a test has a lock on the file."""
    busy_timeout_seconds = 0.05 if database_kind == "sqlite" else 5
    async with await Database.open(database_url, busy_timeout_seconds=busy_timeout_seconds) as database:
        yield database

"""The whole server with its keys on PostgreSQL, while that dies, hangs, restarts or fails over under load.

No chat model is loaded for it: what is asked for is speech.
"""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest
from chat_parts import assert_error
from postgres_parts import Postgres
from serving import Key, Server, poll_until
from small_models import VOICES_ONLY
from speech_parts import SPEECH, VOICE_MODEL
from sqlalchemy import make_url

from server.store.keys import new_key

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# A limit that is never met, and asked of the database for every request all the same.
YAML = f"{VOICES_ONLY}  limited: {{models: [standard], requests_per_minute: 1000000}}\n"
WORD: dict[str, Any] = {"model": VOICE_MODEL, "voice": "emma", "input": "Hello.", "response_format": "wav"}
# docs/operations.md: how soon an outage is known, and a change is refused.
KNOWN_SECONDS = 10
BACK_SECONDS = 15


@dataclass
class Office:
    """A server on a pair of databases, and what clients have asked of it."""

    server: Server
    primary: Postgres
    standby: Postgres
    key: Key
    answered: Counter[int] = field(default_factory=Counter)

    @property
    def admin(self) -> dict[str, str]:
        assert self.server.admin_key is not None
        return {"Authorization": f"Bearer {self.server.admin_key.text}"}

    def ready(self) -> dict[str, Any]:
        response = httpx2.get(f"{self.server.root_url}/health/ready", timeout=60)
        assert response.status_code == 200
        return dict(response.json())

    def make_key(self, name: str) -> httpx2.Response:
        body = {"name": name, "tier": "limited"}
        return httpx2.post(f"{self.server.base_url}/admin/keys", json=body, headers=self.admin, timeout=60)

    def accepts(self, key: str) -> bool:
        return self.ask(key).status_code == 200

    def ask(self, key: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.get(f"{self.server.base_url}/models", headers=headers, timeout=60)

    def recorded(self) -> int:
        """Requests of the clients' key, as the database has them."""
        query = {"key": self.key.public_id}
        rows = httpx2.get(f"{self.server.base_url}/usage", params=query, headers=self.admin, timeout=60)
        return sum(row["requests"] for row in rows.json()["data"])


class Load:
    """Use as `with`: two clients with one key, each asking for a word after the other."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def goes_on(self) -> None:
        """Wait for the next few answers."""
        before = self._office.answered.total()
        poll_until(lambda: self._office.answered.total() >= before + 6, 60)

    def _ask(self) -> None:
        headers = {"Authorization": f"Bearer {self._office.key.text}"}
        with httpx2.Client(base_url=self._office.server.root_url, headers=headers, timeout=60) as client:
            while not self._ended.is_set():
                response = client.post(SPEECH, json=WORD)
                self._office.answered[response.status_code] += 1
                response.read()


@pytest.fixture(scope="module")
def office(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    folder = tmp_path_factory.mktemp("office")
    (folder / "models.yaml").write_text(YAML, encoding="utf-8")
    own = make_url(postgres.new_database())
    with postgres.followed() as standby:
        hosts = {"host": [str(postgres.folder), str(standby.folder)], "target_session_attrs": "read-write"}
        url = own.set(query=hosts).render_as_string(hide_password=False)
        environment = {"HEARTH_MODELS": str(folder / "models.yaml"), "HEARTH_DATABASE_URL": url}
        with Server(folder, environment=environment) as server:
            yield Office(server, postgres, standby, server.make_key(tier="limited"))
            assert server.stop() == 0, server.log()
            assert not (server.data_dir / "hearth.db").exists()
            assert url.partition("?")[0].rpartition("/")[2] not in server.log()


@contextmanager
def outage_under_load(office: Office) -> Iterator[None]:
    """What holds after every outage, the block. Every request of the clients is answered, and recorded once."""
    known = office.make_key("before")
    assert known.status_code == 200, known.text
    with Load(office) as load:
        yield
        load.goes_on()
    poll_until(lambda: office.ready()["degraded"] is None, BACK_SECONDS, describe=office.server.log)
    assert set(office.answered) == {200}
    poll_until(lambda: office.accepts(known.json()["key"]), BACK_SECONDS)  # it was acknowledged
    assert office.recorded() == office.answered.total()
    assert office.make_key("after").status_code == 200


def assert_degraded(office: Office) -> None:
    """Nobody can be known anew and nothing changed, which is said at once or soon; the clients go on."""
    before, began = office.answered.total(), time.monotonic()
    refused = office.make_key("meanwhile")
    assert time.monotonic() - began < KNOWN_SECONDS
    assert_error(refused, 503, "server_overloaded")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    unknown = office.ask(new_key())
    assert_error(unknown, 503, "server_overloaded")
    assert int(unknown.headers["retry-after"]) >= 1
    poll_until(lambda: office.ready()["degraded"] is not None, KNOWN_SECONDS)
    assert office.ready()["status"] == "ready"
    began = time.monotonic()
    assert_error(office.make_key("known to fail"), 503, "server_overloaded")
    assert time.monotonic() - began < 1
    poll_until(lambda: office.answered.total() > before, 60)


def test_a_database_that_is_killed(office: Office) -> None:
    with outage_under_load(office):
        office.primary.kill()
        assert_degraded(office)
        assert "key database fails" in office.server.hearth("status")
        office.primary.start()


def test_a_database_that_hangs(office: Office) -> None:
    with outage_under_load(office):
        office.primary.freeze()
        try:
            assert_degraded(office)
        finally:
            office.primary.thaw()


def test_a_database_that_is_slow(office: Office) -> None:
    """It answers a fifth of the time: requests take longer, and nothing is refused."""
    ended = threading.Event()

    def slow_down() -> None:
        while not ended.is_set():
            office.primary.freeze()
            ended.wait(0.8)
            office.primary.thaw()
            ended.wait(0.2)

    slowing = threading.Thread(target=slow_down)
    with outage_under_load(office):
        slowing.start()
        try:
            for number in range(3):
                assert office.make_key(f"slow {number}").status_code == 200
                assert office.ready()["degraded"] is None
        finally:
            ended.set()
            slowing.join(10)


def test_a_database_that_restarts(office: Office) -> None:
    with outage_under_load(office):
        office.primary.stop()
        office.primary.start()


def test_a_database_that_fails_over(office: Office) -> None:
    """The last one: the primary is dead from then on."""
    with outage_under_load(office):
        office.primary.kill()
        assert_degraded(office)
        office.standby.promote()


def test_on_sqlite_they_are_in_a_file_that_can_be_saved_while_the_server_runs(server: Server, tmp_path: Path) -> None:
    key = server.make_key("saved")
    saved = tmp_path / "saved.db"
    server.hearth("backup", str(saved))
    with sqlite3.connect(saved) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert (key.public_id,) in copy.execute("SELECT public_id FROM api_key").fetchall()
    assert saved.stat().st_mode & 0o777 == 0o600

"""The whole server with its keys on PostgreSQL, while that goes away and comes back. No chat model is loaded for it."""

import sqlite3
from pathlib import Path

import httpx2
import pytest
from chat_parts import assert_error
from postgres_parts import Postgres
from serving import Server, poll_until

pytestmark = pytest.mark.engine

NO_WEIGHTS = """
models:
  absent: {task: chat, tier: all, capabilities: [chat], weights: absent}
  voices: {task: speech, tier: all, capabilities: [speech], weights: voices, demo: voices}  # without one it would end
tiers:
  all: {models: [all], requests_per_minute: 5}
"""


def test_keys_usage_and_limits_are_kept_there_and_known_keys_outlive_an_outage(
    postgres: Postgres, tmp_path: Path
) -> None:
    (tmp_path / "models.yaml").write_text(NO_WEIGHTS, encoding="utf-8")
    url = postgres.new_database()
    server = Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml"), "HEARTH_DATABASE_URL": url})
    server.start()
    try:
        key = server.make_key_by_command(tier="all")
        with httpx2.Client(base_url=server.root_url, headers={"Authorization": f"Bearer {key.text}"}) as client:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["absent", "voices"]
            postgres.stop()
            try:
                assert client.get("/v1/models").status_code == 200  # from memory
                strange = client.get("/v1/models", headers={"Authorization": f"Bearer {unknown(key.text)}"})
                assert strange.status_code in {401, 503}
                usage = client.get("/v1/usage")
                assert_error(usage, 503, "server_overloaded")
                assert int(usage.headers["retry-after"]) >= 1
            finally:
                postgres.start()
            poll_until(lambda: client.get("/v1/usage").status_code == 200, 20)
        assert not (server.data_dir / "hearth.db").exists()
        assert url.rpartition("/")[2] not in server.log()
    finally:
        assert server.stop() == 0


def test_on_sqlite_they_are_in_a_file_that_can_be_saved_while_the_server_runs(server: Server, tmp_path: Path) -> None:
    key = server.make_key("saved")
    saved = tmp_path / "saved.db"
    server.hearth("backup", str(saved))
    with sqlite3.connect(saved) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert (key.public_id,) in copy.execute("SELECT public_id FROM api_key").fetchall()
    assert saved.stat().st_mode & 0o777 == 0o600


def unknown(text: str) -> str:
    """A key that looks right and is not: another id, with the checksum left as it is."""
    return text.replace(text[3:15], text[3:15][::-1], 1)

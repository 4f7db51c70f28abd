"""The audit log over HTTP and on the command line, and what admins are told when the database does not answer."""

import asyncio
import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
from chat_parts import assert_error
from click.testing import Result
from serving import Server
from store_parts import held
from typer.testing import CliRunner

from server.cli import app
from server.store.audit import Actor, local_actor, write_entry
from server.store.database import Database
from server.store.keys import KeyStore
from server.store.sqlite import sqlite_url

AUDIT = "/v1/admin/audit"
NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def hearth(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"HEARTH_DATA_DIR": str(folder)})


async def fill(folder: Path) -> str:
    """Two changes by the local user an hour ago, one by an admin's key long before. Returns the key's id."""
    async with await Database.open(sqlite_url(folder / "hearth.db")) as database:
        store = KeyStore(database)
        _, key = await store.create("[red] door", "standard", notes="private words")
        await store.update(key.public_id, tier="enhanced")
        long_ago, admin = datetime.now(UTC) - timedelta(days=40), Actor("0123456789Ab", "192.0.2.7")
        async with database.writing() as connection:
            await write_entry(connection, long_ago, admin, "config.reload", "models.yaml", {"added": ["pro"]})
        return key.public_id


def test_the_command_line_shows_who_changed_what_newest_first(tmp_path: Path):
    key = asyncio.run(fill(tmp_path))
    shown = hearth(tmp_path, "audit")
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stdout.splitlines() if "key." in line or "config." in line]
    assert ["key.update" in lines[0], "key.create" in lines[1], "config.reload" in lines[2]] == [True] * 3
    assert "standard -> enhanced" in lines[0]
    assert local_actor().name in lines[0]
    assert "[red] door" in lines[1]
    assert ("0123456789Ab" in lines[2], "192.0.2.7" in lines[2]) == (True, True)
    assert "private words" not in shown.stdout
    entries = json.loads(hearth(tmp_path, "audit", "--json", "--since", "7d", "--limit", "1").stdout)["entries"]
    assert [(entry["action"], entry["object"]) for entry in entries] == [("key.update", key)]
    assert entries[0]["detail"] == {"tier": ["standard", "enhanced"]}
    assert len(json.loads(hearth(tmp_path, "audit", "--json", "--since", "7d").stdout)["entries"]) == 2


def test_a_wrong_time_and_a_missing_store_are_explained(tmp_path: Path):
    nothing = hearth(tmp_path, "audit")
    assert (nothing.exit_code, nothing.stdout) == (1, "")
    assert "There is no key store in" in nothing.stderr
    asyncio.run(fill(tmp_path))
    wrong = hearth(tmp_path, "audit", "--since", "soon")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "'soon'" in wrong.stderr
    assert "7d" in wrong.stderr or "90d" in wrong.stderr


def test_a_backup_is_a_whole_database_and_never_overwrites(tmp_path: Path):
    key = asyncio.run(fill(tmp_path))
    copy = tmp_path / "copy.db"
    done = hearth(tmp_path, "backup", str(copy))
    assert done.exit_code == 0, done.output
    assert "hearth restore" in done.stdout
    assert copy.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT public_id FROM api_key").fetchall() == [(key,)]
    connection.close()
    before = copy.read_bytes()
    again = hearth(tmp_path, "backup", str(copy))
    assert (again.exit_code, again.stdout) == (1, "")
    assert "does not exist yet" in again.stderr
    assert copy.read_bytes() == before


@pytest.mark.engine
async def test_the_log_is_bounded_and_begins_where_it_is_asked_to(http: httpx2.AsyncClient):
    await http.post("/v1/admin/keys", json={"name": "for the log", "tier": "standard"})
    everything = (await http.get(AUDIT)).json()
    assert everything["object"] == "list"
    assert [entry["at"] for entry in everything["data"]] == sorted(
        (entry["at"] for entry in everything["data"]), reverse=True
    )
    assert len((await http.get(AUDIT, params={"limit": 1})).json()["data"]) == 1
    assert (await http.get(AUDIT, params={"since": "2099-01-01T00:00:00Z"})).json()["data"] == []
    for params, param in (({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"since": "soon"}, "since")):
        assert_error(await http.get(AUDIT, params=params), 400, "invalid_value", param)


@pytest.mark.engine
async def test_a_database_that_does_not_answer_is_503_with_the_time_to_come_back(
    server: Server, http: httpx2.AsyncClient
):
    with held(server.data_dir / "hearth.db"):
        answer = await http.post("/v1/admin/keys", json={"name": "late", "tier": "standard"})
    assert_error(answer, 503, "server_overloaded")
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert str(server.data_dir) not in answer.text
    assert (await http.get(AUDIT)).status_code == 200

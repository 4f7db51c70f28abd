"""`hearth usage` as people and scripts read it."""

import asyncio
import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from server.cli import app
from server.cli.database import charts
from server.store.database import Database
from server.store.keys import KeyStore
from server.store.sqlite import sqlite_url
from server.store.usage import Usage, UsageBook

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
SPAN = ("--since", "2026-11-20", "--until", "2026-11-22")


def hearth(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["usage", *arguments], env={"HEARTH_DATA_DIR": str(folder)})


async def fill(folder: Path) -> list[str]:
    async with await Database.open(sqlite_url(folder / "hearth.db")) as database, UsageBook(database) as book:
        names = ("Ann [red]", "Bob")
        ids = [(await KeyStore(database).create(name, "standard"))[1].public_id for name in names]
        book.add(ids[0], "plus", "chat", Usage(requests=4, prompt_tokens=100, completion_tokens=60), NOON)
        book.add(ids[0], "plus", "chat", Usage(requests=1, errors=1), NOON + HOUR)
        book.add(ids[1], "pro", "batch", Usage(requests=2, prompt_tokens=40), NOON - 24 * HOUR)
    return ids


@pytest.fixture
def ids(tmp_path: Path) -> list[str]:
    return asyncio.run(fill(tmp_path))


def test_the_table_names_keys_and_draws_a_bar_for_each_row(tmp_path: Path, ids: list[str]):
    shown = hearth(tmp_path, *SPAN, "--by", "key")
    assert shown.exit_code == 0, shown.output
    ann, bob = (next(line for line in shown.stdout.splitlines() if key in line) for key in ids)
    assert ("Ann [red]" in ann, "Bob" in bob) == (True, True)
    assert ann.count("█") > bob.count("█") > 0


def test_over_time_a_chart_shows_requests_and_tokens(tmp_path: Path, ids: list[str]):
    days = hearth(tmp_path, *SPAN).stdout
    assert "most: 5" in days
    assert "most: 160" in days
    hours = hearth(tmp_path, *SPAN, "--by", "hour", "--key", ids[0]).stdout
    assert "2026-11-21 13:00" in hours
    assert "most: 4" in hours


def test_the_chart_leaves_gaps_and_adds_up_what_does_not_fit():
    counts = [(NOON, 8, 80), (NOON + 3 * HOUR, 4, 0)]
    requests, tokens, axis = charts(counts, (NOON, NOON + 4 * HOUR), HOUR, width=80)
    assert requests.plain.startswith("requests  █  ▄  most: 8")
    assert tokens.plain.startswith("tokens    █     most: 80")
    assert axis.plain.strip().startswith("11-21 12:00")
    assert axis.plain.endswith(" to 11-21 15:00")  # four columns have no room for both ends
    many = [(NOON + hours * HOUR, 1, 1) for hours in range(300)]
    requests, *_ = charts(many, (NOON, NOON + 300 * HOUR), HOUR, width=60)
    assert len(requests.plain) < 60
    assert "most: 10" in requests.plain


def test_csv_and_json_hold_the_same_sums(tmp_path: Path, ids: list[str]):
    rows = list(csv.DictReader(hearth(tmp_path, *SPAN, "--by", "day,key,model", "--csv").stdout.splitlines()))
    data = json.loads(hearth(tmp_path, *SPAN, "--by", "day,key,model", "--json").stdout)["data"]
    assert [(row["start"], row["key"], row["model"], row["requests"]) for row in rows] == [
        ("2026-11-20T00:00:00Z", ids[1], "pro", "2"),
        ("2026-11-21T00:00:00Z", ids[0], "plus", "5"),
    ]
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in data] == rows
    assert [row["errors"] for row in data] == [0, 1]
    assert [row["key_name"] for row in rows] == ["Bob", "Ann [red]"]


def test_one_key_and_one_model_are_picked_out(tmp_path: Path, ids: list[str]):
    [row] = json.loads(hearth(tmp_path, *SPAN, "--key", ids[1], "--json").stdout)["data"]
    assert row["requests"] == 2
    assert json.loads(hearth(tmp_path, *SPAN, "--model", "nobody", "--json").stdout)["data"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--csv", "--json"], ["exclude each other"]),
        (["--by", "week"], ["week", "hour, day, key, model, kind"]),
        (["--since", "soon"], ["soon", "90d"]),
        (["--since", "1d", "--until", "2d"], ["later"]),
        (["--key", "0123456789Ab"], ["no key 0123456789Ab"]),
        (["--key", "x"], ["hearth keys list"]),
    ],
)
def test_a_wrong_argument_is_explained(tmp_path: Path, ids: list[str], arguments: list[str], words: list[str]):
    result = hearth(tmp_path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert [word for word in words if word not in result.stderr] == []


def test_a_time_without_usage_says_how_to_look_further(tmp_path: Path, ids: list[str]):
    result = hearth(tmp_path, "--since", "2026-01-01", "--until", "2026-01-02")
    assert result.exit_code == 0
    assert "Look further back" in result.stdout

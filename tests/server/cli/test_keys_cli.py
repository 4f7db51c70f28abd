"""`hearth keys` as people and scripts use it, against a real database and the models.yaml of this repository."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import Result
from store_parts import authenticate
from typer.testing import CliRunner

from server.cli.keys import app
from server.store.database import Database
from server.store.keys import ApiKey, KeyStore
from server.store.sqlite import sqlite_url

if TYPE_CHECKING:
    Keys = Callable[..., Result]

MODELS = Path(__file__).parents[3] / "models.yaml"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    environment = {"HEARTH_DATA_DIR": str(tmp_path), "HEARTH_MODELS": str(MODELS), "COLUMNS": "40"}

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, env=environment)

    return run


def created(keys: Keys, *arguments: str) -> dict[str, Any]:
    result = keys("create", "--name", "laptop", "--tier", "standard", "--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def authenticated(folder: Path, text: str) -> ApiKey | None:
    async def ask() -> ApiKey | None:
        async with await Database.open(sqlite_url(folder)) as database:
            return await authenticate(KeyStore(database), text)

    return asyncio.run(ask())


def test_create_prints_one_json_object_with_a_key_that_works(keys: Keys, tmp_path: Path) -> None:
    value = created(keys, "--scope", "models", "--scope", "chat", "--model", "service-plus")
    key = authenticated(tmp_path, value["key"])
    assert key is not None
    first = ["key", "public_id", "name", "tier", "scopes", "models", "expires_at", "created_at"]
    assert list(value) == [*first, "notes", "limits", "effective_limits"]
    assert (value["public_id"], value["scopes"]) == (key.public_id, ["chat", "models"])
    assert (value["models"], value["expires_at"]) == (["service-plus"], None)
    assert value["created_at"] == f"{key.created_at:%Y-%m-%dT%H:%M:%SZ}"


def test_create_for_people_prints_the_key_alone_and_whole_on_its_line(keys: Keys, tmp_path: Path) -> None:
    result = keys("create", "--name", "laptop", "--tier", "standard")
    assert result.exit_code == 0
    [text] = [line for line in result.stdout.splitlines() if line.startswith("hk_")]
    assert authenticated(tmp_path, text)
    assert "Shown once" in result.stdout


@pytest.mark.parametrize(("given", "ends"), [("2099-01-31", "2099-01-31T23:59:59Z"), ("90d", None), ("4w", None)])
def test_an_end_is_a_day_or_a_span(keys: Keys, given: str, ends: str | None) -> None:
    value = created(keys, "--expires", given)
    assert value["expires_at"] > value["created_at"]
    assert ends in (None, value["expires_at"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tier", "standart"], ["standart", "Did you mean 'standard'?", "enhanced"]),
        (["--scope", "chta"], ["chta", "Did you mean 'chat'?", "metrics"]),
        (["--model", "service-pls"], ["service-pls", "Did you mean 'service-plus'?", "service-pro"]),
        (["--model", "service-pro"], ["standard", "may not use", "enhanced"]),
        (["--expires", "soon"], ["soon", "90d", "2027-01-31"]),
        (["--expires", "999999w"], ["999999w"]),
        (["--expires", "2020-01-01"], ["passed"]),
        (["--expires", "0d"], ["passed"]),
        (["--name", "a\tb"], ["printable"]),
    ],
)
def test_a_wrong_argument_is_named_with_what_would_be_right(
    keys: Keys, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    before = created(keys)
    result = keys("create", "--name", "laptop", "--tier", "standard", "--json", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert [word for word in words if word not in result.stderr] == []
    listed = json.loads(keys("list", "--json").stdout)["keys"]
    assert [key["public_id"] for key in listed] == [before["public_id"]]


def test_list_shows_whole_ids_and_nothing_of_a_secret(keys: Keys) -> None:
    values = [created(keys), created(keys, "--name", "[red] door")]
    shown = keys("list").stdout
    assert all(value["public_id"] in shown for value in values)
    assert "[red] door" in shown
    for output in (shown, keys("list", "--json").stdout):
        assert not any(value["key"].split("_")[2][:12] in output for value in values)
    listed = json.loads(keys("list", "--json").stdout)["keys"]
    assert [key["public_id"] for key in listed] == [value["public_id"] for value in values]


@pytest.mark.parametrize("form", ["{public_id}", "hk_{public_id}", "{key}", "{key}mistyped"])
def test_revoke_takes_the_id_in_any_form_and_never_repeats_a_secret(keys: Keys, tmp_path: Path, form: str) -> None:
    value = created(keys)
    result = keys("revoke", form.format(**value))
    assert result.exit_code == 0
    assert value["public_id"] in result.stdout
    assert value["key"].split("_")[2][:12] not in result.output
    assert authenticated(tmp_path, value["key"]) is None
    again = keys("revoke", value["public_id"], "--json")
    assert (again.exit_code, json.loads(again.stdout)["public_id"]) == (0, value["public_id"])


def test_revoking_the_last_admin_key_says_how_to_make_another(keys: Keys) -> None:
    first, second = (created(keys, "--scope", "chat", "--scope", "admin")["public_id"] for _ in range(2))
    user = created(keys)["public_id"]
    assert "No admin key is left" not in keys("revoke", first).stdout
    told = keys("revoke", second).stdout
    command = told.partition("hearth keys ")[2].split()
    assert keys(*command, "--json").exit_code == 0
    assert "No admin key is left" not in keys("revoke", user).stdout


def test_revoking_an_unknown_or_garbled_id_is_refused_without_repeating_it(keys: Keys) -> None:
    created(keys)
    unknown = keys("revoke", "0123456789Ab", "--json")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "no key 0123456789Ab" in unknown.stderr
    garbled = keys("revoke", "7YZqUXECKXVf2i8Fz128xGfkge8WLpqt")
    assert garbled.exit_code == 2
    assert "7YZqUXEC" not in garbled.output


def test_reading_verbs_make_no_store_where_there_is_none(keys: Keys, tmp_path: Path) -> None:
    for arguments in (["list"], ["list", "--json"], ["revoke", "0123456789Ab"]):
        result = keys(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "There is no key store in" in result.stderr
    assert not (tmp_path / "hearth.db").exists()


def test_a_damaged_database_is_reported_with_the_remedy(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "hearth.db").write_bytes(b"this is no database" * 300)
    result = keys("list", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not a SQLite database" in result.stderr
    assert "docs/keys.md" in result.stderr


def test_show_names_the_limits_that_hold_and_whose_they_are(keys: Keys) -> None:
    value = created(keys, "--notes", "for Ann", "--requests-per-minute", "30", "--batch-items", "none")
    assert value["limits"]["requests_per_minute"] == 30
    shown = keys("show", value["public_id"]).stdout
    assert "for Ann" in shown
    assert "30 (its own)" in shown
    assert "no limit (its tier's)" in shown
    described = json.loads(keys("show", value["key"], "--json").stdout)
    assert described["notes"] == "for Ann"
    assert value["key"].split("_")[2] not in shown + json.dumps(described)


def test_limits_are_seen_wherever_a_key_is(keys: Keys, tmp_path: Path) -> None:
    models = tmp_path / "limited.yaml"
    models.write_text(MODELS.read_text().replace("parallel_requests: null", "parallel_requests: 4", 1))
    options = ("--models", str(models))
    told = keys(*options, "create", "--name", "a", "--tier", "standard", "--tokens-per-minute", "900").stdout
    assert "Limits: 900 tokens/min*, 4 parallel. (* its own; the others are its tier's)\n" in told
    [listed] = json.loads(keys(*options, "list", "--json").stdout)["keys"]
    assert listed["limits"]["parallel_requests"] is None
    assert listed["effective_limits"] == {
        "requests_per_minute": None,
        "tokens_per_minute": 900,
        "parallel_requests": 4,
        "batch_items": None,
        "images_per_day": None,
    }
    assert "900 tokens/min*, 4 parallel" in keys(*options, "list").stdout
    changed = keys(*options, "update", listed["public_id"], "--tokens-per-minute", "none")
    assert "Limits: 4 parallel.\n" in changed.stdout
    shown = json.loads(keys(*options, "show", listed["public_id"], "--json").stdout)
    assert shown["effective_limits"]["tokens_per_minute"] is None
    assert "none" in keys("list").stdout


def test_keys_are_listed_also_while_models_yaml_is_wrong(keys: Keys, tmp_path: Path) -> None:
    value = created(keys, "--requests-per-minute", "30")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("models: 3")
    listed = keys("--models", str(wrong), "list")
    assert listed.exit_code == 0
    assert value["public_id"] in listed.stdout
    assert "30 requests/min*" in listed.stdout
    assert "Limits of tiers are not shown" in listed.stderr
    assert "unknown (its tier's)" in keys("--models", str(wrong), "show", value["public_id"]).stdout


def test_update_changes_what_is_named_and_none_goes_back_to_the_tier(keys: Keys) -> None:
    value = created(keys, "--model", "service-plus", "--requests-per-minute", "30", "--tokens-per-minute", "900")
    arguments = ["--tier", "enhanced", "--model", "service-pro", "--requests-per-minute", "none", "--batch-items", "0"]
    changed = json.loads(keys("update", value["public_id"], *arguments, "--json").stdout)
    assert (changed["tier"], changed["models"], changed["name"]) == ("enhanced", ["service-pro"], "laptop")
    limits = [changed["limits"][name] for name in ("requests_per_minute", "tokens_per_minute", "batch_items")]
    assert limits == [None, 900, 0]
    assert json.loads(keys("update", value["public_id"], "--all-models", "--json").stdout)["models"] is None
    told = keys("update", value["public_id"], "--notes", "moved", "--scope", "chat")
    assert "notes" in told.stdout
    assert "within 10 seconds" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Nothing to change", "--help"]),
        (["--model", "service-pro"], ["standard", "may not use"]),
        (["--model", "service-plus", "--all-models"], ["exclude each other"]),
        (["--tier", "standart"], ["Did you mean 'standard'?"]),
        (["--scope", "chta"], ["Did you mean 'chat'?"]),
        (["--requests-per-minute", "many"], ["--requests-per-minute", "'many'", "none"]),
        (["--requests-per-minute", "-1"], ["-1"]),
        (["--images-per-day", "99999999999"], ["--images-per-day"]),
    ],
)
def test_a_wrong_update_is_refused_and_changes_nothing(keys: Keys, arguments: list[str], words: list[str]) -> None:
    value = created(keys)
    before = keys("show", value["public_id"], "--json").stdout
    result = keys("update", value["public_id"], *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert [word for word in words if word not in result.stderr] == []
    assert keys("show", value["public_id"], "--json").stdout == before


def test_rotate_prints_a_successor_once_and_both_work(keys: Keys, tmp_path: Path) -> None:
    value = created(keys, "--batch-items", "3")
    new = json.loads(keys("rotate", value["public_id"], "--overlap", "2h", "--json").stdout)
    assert (new["replaces"], new["limits"]["batch_items"]) == (value["public_id"], 3)
    assert authenticated(tmp_path, value["key"])
    assert authenticated(tmp_path, new["key"])
    told = keys("rotate", new["public_id"], "--overlap", "0h")
    [text] = [line for line in told.stdout.splitlines() if line.startswith("hk_")]
    assert authenticated(tmp_path, text)
    assert authenticated(tmp_path, new["key"]) is None
    again = keys("rotate", value["public_id"])
    assert again.exit_code == 2
    assert new["public_id"] in again.stderr
    assert keys("rotate", value["public_id"], "--overlap", "long").exit_code == 2


def test_expire_sets_moves_and_takes_away_the_end(keys: Keys) -> None:
    named = created(keys)["public_id"]
    assert json.loads(keys("expire", named, "--at", "2099-01-31", "--json").stdout)["expires_at"] == (
        "2099-01-31T23:59:59Z"
    )
    assert json.loads(keys("expire", named, "--in", "90d", "--json").stdout)["expires_at"] < "2099"
    assert "no end" in keys("expire", named, "--never").stdout
    for wrong in ([], ["--never", "--in", "1d"], ["--at", "2020-01-01"], ["--in", "soon"]):
        assert keys("expire", named, *wrong).exit_code == 2


def test_revoke_takes_a_name_that_one_key_has_and_names_the_ids_where_there_are_more(keys: Keys) -> None:
    first, second = created(keys)["public_id"], created(keys)["public_id"]
    several = keys("revoke", "laptop")
    assert several.exit_code == 2
    assert first in several.stderr
    assert second in several.stderr
    assert keys("revoke", first).exit_code == 0
    revoked = json.loads(keys("revoke", "laptop", "--json").stdout)
    assert (revoked["public_id"], revoked["revoked_at"] is None) == (second, False)
    assert "effective_limits" in revoked
    third = created(keys)["public_id"]  # a key that works comes first
    assert json.loads(keys("show", "laptop", "--json").stdout)["public_id"] == third
    assert keys("revoke", "nobody's").exit_code == 2


def test_a_revoked_key_is_found_by_a_name_that_no_other_has(keys: Keys) -> None:
    only = created(keys)["public_id"]
    keys("revoke", "laptop")
    assert json.loads(keys("show", "laptop", "--json").stdout)["public_id"] == only


def test_a_name_that_one_key_has_stands_for_its_id_in_each_verb(keys: Keys) -> None:
    first = created(keys)["public_id"]
    for verb in (["show"], ["update", "--notes", "new"], ["expire", "--in", "90d"], ["rotate"]):
        told = keys(verb[0], "laptop", *verb[1:], "--json")
        assert (told.exit_code, first in told.stdout) == (0, True), told.output
        assert "effective_limits" in json.loads(told.stdout)
    for verb in (["show"], ["update", "--notes", "new"], ["expire", "--never"], ["rotate"], ["revoke"]):
        assert "2 keys have this name" in keys(verb[0], "laptop", *verb[1:]).stderr
        assert "No key has this name or id" in keys(verb[0], "nobody's", *verb[1:]).stderr


def test_list_leaves_out_keys_that_do_not_work_any_more_if_asked_to(keys: Keys) -> None:
    first, second = created(keys)["public_id"], created(keys)["public_id"]
    keys("revoke", first)
    listed = json.loads(keys("list", "--active", "--json").stdout)["keys"]
    assert [key["public_id"] for key in listed] == [second]
    assert len(json.loads(keys("list", "--json").stdout)["keys"]) == 2
    keys("revoke", second)
    assert "No key works now" in keys("list", "--active").stdout


def test_a_file_of_colleagues_becomes_keys_that_work(keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "colleagues.csv"
    file.write_text(
        "\ufeffname,tier,expires,models,scopes,requests_per_minute,notes\n"
        '"Ann, Office",standard,90d,service-plus,chat models,30,\n'
        "Zoë,enhanced,,,,,third floor\n",
        encoding="utf-8",
    )
    result = keys("create", "--from", str(file), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    ann, zoe = json.loads(result.stdout)["keys"]
    assert (ann["name"], ann["scopes"], ann["models"]) == ("Ann, Office", ["chat", "models"], ["service-plus"])
    assert (ann["limits"]["requests_per_minute"], ann["expires_at"] is None) == (30, False)
    assert (zoe["tier"], zoe["expires_at"], zoe["notes"]) == ("enhanced", None, "third floor")
    for one in (ann, zoe):
        key = authenticated(tmp_path, one["key"])
        assert key is not None
        assert key.public_id == one["public_id"]
    table = keys("create", "--from", str(file))
    assert table.exit_code == 0
    assert "Shown once" in table.stdout
    assert len(json.loads(keys("list", "--json").stdout)["keys"]) == 4


def test_of_a_file_with_mistakes_no_key_is_made_and_each_line_is_named(keys: Keys, tmp_path: Path) -> None:
    created(keys)
    file = tmp_path / "colleagues.csv"
    file.write_text(
        "name,tier,expires,images_per_day\n"
        "Ann,standard,,\n"
        "Ben,standrad,,\n"
        ",standard,,\n"
        "Cleo,standard,yesterday,\n"
        "Dan,standard,,many\n"
        "Eve,standard\n"
    )
    result = keys("create", "--from", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    named = [line.split(":")[0].strip() for line in result.stderr.splitlines()[1:]]
    assert named == [f"line {number}" for number in range(3, 8)]
    assert "Did you mean 'standard'?" in result.stderr
    assert len(json.loads(keys("list", "--json").stdout)["keys"]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,teir\na,standard\n", "unknown columns: 'teir'"),
        ("name\na\n", "has no column tier"),
        ("", "has no column name"),
        ("name,tier\n", "has no row"),
        ('name,tier\n"a,standard\n', "cannot be read as CSV"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_refused(keys: Keys, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "colleagues.csv"
    file.write_text(text)
    result = keys("create", "--from", str(file))
    assert result.exit_code in {1, 2}
    assert said in result.stderr
    assert not (tmp_path / "hearth.db").exists()


def test_a_file_and_options_do_not_mix(keys: Keys, tmp_path: Path) -> None:
    assert "give no other option" in keys("create", "--from", str(tmp_path / "x.csv"), "--tier", "standard").stderr
    assert "Give --name and --tier" in keys("create", "--tier", "standard").stderr

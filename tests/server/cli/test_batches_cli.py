"""`hearth batches` on the real server, with a key in the environment like anybody's."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from batch_parts import jsonl, line, read_jsonl
from serving import BIN, Key, Server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def key(server: Server) -> Key:
    return server.make_key("of a terminal", scopes=["batch"])


def hearth(server: Server, key: Key | None, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    own = {"HEARTH_DATA_DIR": str(server.data_dir)} | ({} if key is None else {"HEARTH_KEY": key.text})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")} | own
    command = [BIN / "hearth", "batches", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_run_takes_a_file_to_its_answers_and_leaves_nothing_behind(server: Server, key: Key, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(jsonl([*(line(f"line {number}") for number in range(20)), line("wrong", temperature=9)]))
    done = hearth(server, key, "run", file)
    assert done.returncode == 1, done.stderr  # one line has an error
    assert "completed: 20 answered, 1 with an error" in done.stdout
    assert "lines a second" in done.stdout
    output, errors = (
        read_jsonl((tmp_path / f"questions.jsonl.{kind}.jsonl").read_bytes()) for kind in ("output", "errors")
    )
    assert [one["custom_id"] for one in output] == [f"line {number}" for number in range(20)]
    assert [one["custom_id"] for one in errors] == ["wrong"]

    (listed,) = json.loads(hearth(server, key, "list", "--json").stdout)["data"]
    assert listed["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    shown = hearth(server, key, "show", listed["id"])
    assert "completed" in shown.stdout
    assert listed["input_file_id"] not in {entry.name for entry in (server.data_dir / "batches" / "files").iterdir()}
    late = hearth(server, key, "cancel", listed["id"])
    assert (late.returncode, late.stderr) == (1, "This batch cannot be cancelled any more: it is completed.\n")


def test_answers_that_cannot_be_written_are_refused_before_anything_is_sent(
    server: Server, key: Key, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(jsonl([line("one")]))
    before = len(json.loads(hearth(server, key, "list", "--json").stdout)["data"])
    refused = hearth(server, key, "run", file, "--output", tmp_path / "nowhere" / "answers.jsonl")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "cannot be written: check that its folder is there" in refused.stderr
    assert len(json.loads(hearth(server, key, "list", "--json").stdout)["data"]) == before
    (tmp_path / "taken").mkdir()
    late = hearth(server, key, "run", file, "--output", tmp_path / "taken", "--keep")
    assert late.returncode == 1
    assert "The server keeps it: GET http" in late.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["questions.jsonl", "taken"]


def test_what_is_wrong_is_said_in_one_line(server: Server, key: Key, tmp_path: Path) -> None:
    assert "Set HEARTH_KEY" in hearth(server, None, "list").stderr
    assert "no such batch" in hearth(server, key, "show", "batch_1").stderr
    for asked in (("cancel", "x"), ("list",)):
        assert "does not answer" in hearth(server, key, *asked, "--url", "http://127.0.0.1:1/v1").stderr
    for wrong in ("http://127.0.0.1:80a0/v1", "http://[::1/v1"):
        said = hearth(server, key, "list", "--url", wrong)
        assert (said.returncode, f"{wrong} is not an address" in said.stderr) == (2, True), said.stderr
    assert "HEARTH_KEY has a character that no key has" in hearth(server, Key("hk_\u2026"), "list").stderr
    file = tmp_path / "wrong.jsonl"
    file.write_bytes(b"nonsense\n")
    assert "has no `url`" in hearth(server, key, "run", file).stderr
    kept = {entry.name for entry in (server.data_dir / "batches" / "files").iterdir()}
    refused = hearth(server, key, "run", file, "--endpoint", "/v1/foo")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "endpoint" in refused.stderr
    assert {entry.name for entry in (server.data_dir / "batches" / "files").iterdir()} <= kept
    before = tmp_path / "wrong.jsonl.output.jsonl"
    before.write_text("of a run before")
    failed = hearth(server, key, "run", file, "--endpoint", "/v1/chat/completions")
    assert failed.returncode == 1
    assert "failed: the file was refused, and no line was answered" in failed.stdout
    assert f"From an earlier run: {before}" in failed.stdout
    assert "line 1: This line is not a JSON object" in failed.stderr

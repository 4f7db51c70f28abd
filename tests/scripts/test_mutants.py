"""`scripts/test mutants` on a core of a few lines: what tests notice, what they do not, and what is known to be the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CORE = """\
LARGE = 40


def is_large(size: int | None, *, exact: bool = False) -> bool:
    return size is not None and size >= LARGE


def untouched() -> int:
    return 1
"""
TEST = """\
from core import is_large


def test_sizes():
    assert is_large(50) and not is_large(30) and not is_large(None)
"""


def mutants(folder: Path, *arguments: str, **config: object) -> subprocess.CompletedProcess[str]:
    (folder / "core.py").write_text(CORE)
    (folder / "test_core.py").write_text(TEST)
    target = {"file": "core.py", "only": ["is_large"], "tests": ["test_core.py"]}
    (folder / "mutants.yaml").write_text(yaml.safe_dump({"targets": [target]} | config))
    command = [sys.executable, str(ROOT / "tests" / "mutants.py"), "--config", "mutants.yaml", "--json", "found.json"]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_what_no_test_notices_is_listed_and_fails(tmp_path: Path):
    done = mutants(tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["mutants"]
    survivors = {one["becomes"] for one in found if one["outcome"] == "survived"}
    line = "return size is not None and size > LARGE"
    assert survivors == {line, "def is_large(size: int | None, *, exact: bool = True) -> bool:"}
    assert line in done.stdout
    killed = {one["becomes"] for one in found if one["outcome"] == "killed"}
    assert "return size is None and size >= LARGE" in killed
    assert all(one["file"] == "core.py" and one["line"] in {4, 5} for one in found)
    assert (tmp_path / "core.py").read_text() == CORE


def test_what_is_known_as_equivalent_is_left_out_until_it_is_not_made_any_more(tmp_path: Path):
    was = "return size is not None and size >= LARGE"
    known = [
        {"file": "core.py", "was": was, "becomes": was.replace(">=", ">"), "reason": "No size is as large."},
        {
            "file": "core.py",
            "was": "def is_large(size: int | None, *, exact: bool = False) -> bool:",
            "becomes": "def is_large(size: int | None, *, exact: bool = True) -> bool:",
            "reason": "It is not used.",
        },
    ]
    done = mutants(tmp_path, equivalent=known)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 known as equivalent" in done.stdout
    done = mutants(tmp_path, equivalent=[known[0] | {"was": "return 2"}])
    assert done.returncode == 1
    assert "take them out" in done.stderr


def test_tests_that_fail_as_they_are_say_so(tmp_path: Path):
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert False, 'as it is'\n")
    done = mutants(tmp_path, "--sample", "1", targets=[{"file": "core.py", "tests": ["test_wrong.py"]}])
    assert done.returncode == 1
    assert "as it is" in done.stderr

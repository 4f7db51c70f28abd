"""Remedies that are copied and pasted begin with a command that the reader's shell finds."""

from __future__ import annotations

from pathlib import Path

from server.settings import load_settings
from server.terminal import HEARTH, keys_command, typed

SCRIPT = Path("/opt/hearth/.venv/bin/hearth")


def test_in_the_checkout_it_is_the_path_from_there():
    assert typed(SCRIPT, None, Path("/opt/hearth")) == ".venv/bin/hearth"


def test_elsewhere_it_is_the_whole_path():
    assert typed(SCRIPT, None, Path("/root")) == "/opt/hearth/.venv/bin/hearth"
    assert typed(Path("/my tools/hearth"), None, Path("/root")) == "'/my tools/hearth'"


def test_where_the_shell_finds_this_very_one_its_name_will_do():
    assert typed(SCRIPT, str(SCRIPT), Path("/opt/hearth")) == "hearth"
    assert typed(SCRIPT, "/usr/bin/hearth", Path("/opt/hearth")) == ".venv/bin/hearth"


def test_a_data_directory_that_was_given_is_part_of_the_command(tmp_path: Path):
    given = load_settings(data_dir=tmp_path / "var 2")
    assert keys_command(given, "create --name me") == f"{HEARTH} keys --data-dir '{tmp_path}/var 2' create --name me"
    assert keys_command(load_settings(), "list") == f"{HEARTH} keys list"

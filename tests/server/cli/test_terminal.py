"""Remedies begin with a command that the reader's shell finds, and tables lose no word in a terminal of usual width."""

import io
from collections import Counter
from pathlib import Path

import pytest
from rich.bar import Bar
from rich.console import Console

from server.settings import load_settings
from server.terminal import HEARTH, fitted, keys_command, table, typed

SCRIPT = Path("/opt/hearth/.venv/bin/hearth")
ROWS = [
    ("kxVgkoEgeara", "the laptop in the kitchen", "2026-11-21", "chat, batch, images, audio"),
    ("0123456789Ab", "[red] door", "never", "all but one"),
]


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


def drawn(width: int) -> list[str]:
    made = table(
        ("id", "name", "last used", "scopes", "tokens"), [(*row, Bar(10, 0, number)) for number, row in enumerate(ROWS)]
    )
    made.columns[-1].min_width, made.columns[-1].max_width = 12, 40
    out = io.StringIO()
    console = Console(width=width, file=out)
    console.print(fitted(made, console))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 70, 80, 100, 120, 160, 300])
def test_nothing_is_lost_ids_stay_whole_and_no_line_is_too_long(width: int):
    lines = drawn(width)
    text = " ".join(lines)
    assert all(row[0] in text for row in ROWS)
    letters = Counter("".join(cell for row in ROWS for cell in row).replace(" ", ""))
    assert letters <= Counter(text)
    assert "…" not in text
    assert max(map(len, lines)) <= width


def test_a_terminal_too_narrow_for_the_words_has_lines_below_each_first_cell():
    assert [line.rstrip() for line in drawn(40)[:3]] == [
        "kxVgkoEgeara",
        "  name: the laptop in the kitchen, last",
        "  used: 2026-11-21, scopes: chat, batch,",
    ]


def test_a_wide_terminal_has_a_line_for_each_row():
    assert all(any(all(cell in line for cell in row) for line in drawn(160)) for row in ROWS)

"""Tables of the command line: in a terminal of any width every word of every cell is there, whole."""

from __future__ import annotations

import io

import pytest
from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.terminal import fitted

ROWS = [
    ("kxVgkoEgeara", "the laptop in the kitchen", "2026-11-21", "chat, batch, images, audio"),
    ("0123456789Ab", "[red] door", "never", "all but one"),
]


def table() -> Table:
    made = Table("id", "name", "last used", "scopes", box=box.SIMPLE)
    made.add_column("tokens", min_width=12, max_width=40)
    for number, row in enumerate(ROWS):
        made.add_row(*map(Text, row), Bar(10, 0, number))
    return made


def drawn(width: int) -> list[str]:
    out = io.StringIO()
    Console(width=width, file=out).print(fitted(table(), width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 60, 70, 80, 100, 120, 160, 300])
def test_no_word_is_lost_and_no_line_is_too_long(width: int):
    lines = drawn(width)
    words = " ".join(lines).split()
    for row in ROWS:
        assert [word for cell in row for word in cell.split() if word not in words] == []
    assert "…" not in " ".join(words)
    assert max(map(len, lines)) <= width


def test_columns_move_together_before_rows_are_taken_apart():
    made = Table("id", "name", "model", box=box.SIMPLE)
    made.add_row("a" * 10, "b" * 10, "c" * 10)
    out = io.StringIO()
    Console(width=35, file=out).print(fitted(made, 35))
    assert f"{'a' * 10} {'b' * 10} {'c' * 10}" in out.getvalue()


def test_a_wide_terminal_has_a_line_for_each_row_and_a_narrow_one_a_line_for_each_cell():
    assert all(any(all(cell in line for cell in row) for line in drawn(160)) for row in ROWS)
    assert sum(line.split()[:1] == ["name"] for line in drawn(40)) == len(ROWS)

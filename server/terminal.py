"""Draws the command line's tables so that nothing is lost: wide in a pipe, wrapped in a terminal, upright if narrow.

What is in them is the verbs' affair.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from server.settings import Settings

_PIPE_WIDTH = 160
_WIDEST = 10_000


def typed(script: Path, found: str | None, here: Path) -> str:
    """Return `hearth` if that is what the shell finds, else the path of `script`, as seen from the folder `here`."""
    if found is not None and Path(found).resolve() == script.resolve():
        return "hearth"
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


HEARTH = typed(Path(sys.prefix, "bin", "hearth"), shutil.which("hearth"), Path.cwd())


def keys_command(settings: Settings, rest: str) -> str:
    """Return the line that begins with `hearth keys`; a data directory that was given is part of it."""
    given = "data_dir" in settings.model_fields_set
    where = f" --data-dir {shlex.quote(str(settings.data_dir))}" if given else ""
    return f"{HEARTH} keys{where} {rest}"


def terminal_width() -> int:
    """Return how wide a line may be; in a pipe there is no such limit, and this is what charts are drawn for."""
    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def time_left(seconds: float | None) -> str:
    """Say how long something should take yet; nothing where that is not known."""
    return "" if seconds is None else f"about {math.ceil(seconds)} s left"


def print_rich(*shown: RenderableType) -> None:
    """Draw tables and charts."""
    for item in shown:
        width = terminal_width()
        if isinstance(item, Table):
            # Who reads a pipe wants a row to be a line
            width = width if sys.stdout.isatty() else max(width, _measured(item)[1])
            Console(width=width).print(fitted(item, width))
        else:
            Console(width=width).print(item)


def fitted(table: Table, width: int) -> RenderableType:
    """Return the table so that it fits in `width` with every word whole; where it cannot, its rows one below the other.

    By itself rich would cut words off, and leave out whole columns.
    """
    least, natural, columns = _measured(table)
    for column in table.columns:
        column.overflow = "fold"
    if natural <= width:
        return table
    if least > width:
        table.padding = 0  # its columns are apart by a space all the same
        least, _, columns = _measured(table)
    if least > width:
        return _upright(table) if table.show_header else table
    spare = width - least
    for column, (narrow, wide) in zip(table.columns, columns, strict=True):
        share = min(wide - narrow, spare)
        column.min_width = column.max_width = narrow + share
        spare -= share
    return table


def _measured(table: Table) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the table's width with every word in its own line, and with none; and both for each column."""
    paper = Console(width=_WIDEST)
    columns = []
    for column in table.columns:
        cells = [column.header, *column.cells] if table.show_header else list(column.cells)
        sizes = [Measurement.get(paper, paper.options, cell) for cell in cells]
        lowest, highest = column.min_width or 0, column.max_width or _WIDEST
        narrow, wide = (min(max(lowest, *edge), highest) for edge in zip(*sizes, strict=True))
        columns.append((narrow, wide))
    natural = Measurement.get(paper, paper.options, table).maximum
    frame = natural - sum(wide for _, wide in columns)
    return frame + sum(narrow for narrow, _ in columns), natural, columns


def _upright(table: Table) -> Group:
    """Each row as a small table of names and values, with nothing but text in it."""
    rows = zip(*([*column.cells] for column in table.columns), strict=True)
    names = [column.header for column in table.columns]
    shown = []
    for row in rows:
        block = Table(box=box.SIMPLE, show_header=False)
        block.add_column(overflow="fold")
        block.add_column(overflow="fold")
        for name, cell in zip(names, row, strict=True):
            if isinstance(cell, (str, Text)):
                block.add_row(name, cell)
        shown.append(block)
    return Group(*shown)

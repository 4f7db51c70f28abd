"""What is printed in a terminal: how `hearth` is typed here, tables that fit, sizes and times, the log."""

import logging
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from server.settings import Settings

_PIPE_WIDTH = 10_000
# What uvicorn says when a file is cut off, which StreamedResponse does on purpose.
_CUT_OFF = "ASGI callable returned without completing response."


def typed(script: Path, found: str | None, here: Path) -> str:
    """Return `hearth` if that is what the shell finds, else the path of `script`, as seen from the folder `here`."""
    if found is not None and Path(found).resolve() == script.resolve():
        return "hearth"
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


HEARTH = typed(Path(sys.prefix, "bin", "hearth"), shutil.which("hearth"), Path.cwd())
"""The first word of every command that a message suggests."""


def keys_command(settings: Settings, rest: str) -> str:
    """Return a `hearth keys` command line, with the data directory if it was set."""
    given = "data_dir" in settings.model_fields_set
    where = f" --data-dir {shlex.quote(str(settings.data_dir))}" if given else ""
    return f"{HEARTH} keys{where} {rest}"


def table(columns: Sequence[str], rows: Iterable[Iterable[RenderableType]]) -> Table:
    """Return a table. Text is not read as markup, like a name [red]. The first column, for copying, wraps last."""
    left = 0 if sys.stdout.isatty() else 1  # terminals are narrow
    made = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, left))
    for column in made.columns:
        column.overflow = "fold"
    made.columns[0].no_wrap = True
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def print_rich(shown: RenderableType) -> None:
    """Print a table or a line. In a pipe each row is one line. In a narrow terminal a table becomes a list."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(fitted(shown, console))


def fitted(shown: RenderableType, console: Console) -> RenderableType:
    """Return what to print: a table that is too wide becomes lines, without its bars."""
    if not isinstance(shown, Table):
        return shown
    wanted = Measurement.get(console, console.options.update_width(_PIPE_WIDTH), shown)
    return shown if wanted.minimum <= console.width else Group(*_lines(shown))


def _lines(made: Table) -> Iterator[RenderableType]:
    first, *others = made.columns
    for name, *cells in zip(first.cells, *(column.cells for column in others), strict=True):
        named = [
            Text.assemble((f"{column.header}: ", "dim"), cell)
            for column, cell in zip(others, cells, strict=True)
            if isinstance(cell, Text) and cell.plain
        ]
        yield name
        yield Padding(Text(", ").join(named), (0, 0, 0, 2))


def wrapped(text: str, indent: int = 2) -> str:
    """Break a sentence between words to fit a terminal; later lines are indented. In a pipe it stays one line."""
    if not sys.stdout.isatty():
        return text
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def time_left(seconds: float | None) -> str:
    """Say how long something should still take; nothing if that is not known."""
    return "" if seconds is None else f"about {math.ceil(seconds)} s left"


def size_text(size_bytes: float) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def set_up_log(level: str) -> None:
    """Log our messages from `level` on, those of libraries from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it would warn of each invalid request
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != _CUT_OFF)
    logging.getLogger("hearth").setLevel(level.upper())

"""How a comparison is shown: a table for people, one JSON document for programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.compare import Row
    from benchmarks.figures import Figures
    from benchmarks.verdicts import Verdict

_WIDTH_OUTSIDE_A_TERMINAL = 250


def document(
    benchmark: str,
    conditions: dict[str, Any],
    settings: dict[str, Any],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict] = (),
) -> bytes:
    """Return the whole report as JSON: conditions, settings, and per case medians, ratios and every single run."""
    whole = {"benchmark": benchmark, "conditions": conditions, "settings": settings, "rows": rows}
    if verdicts:
        whole["verdicts"] = verdicts
    return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str)) + b"\n"


def print_table(title: str, rows: Sequence[Row], columns: dict[str, str]) -> None:
    """Print medians and ratios; `columns` maps a figure to its heading. Outside a terminal it is Markdown."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OUTSIDE_A_TERMINAL, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)
    for heading in ("case", "target"):
        table.add_column(heading, no_wrap=True)
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=not console.is_terminal)
    for row in rows:
        for number, (target, figures) in enumerate(row.medians.items()):
            table.add_row(row.case if number == 0 else "", target, *_cells(figures, columns))
        for other, ratio in row.ratios.items():
            last = console.is_terminal and other == [*row.ratios][-1]
            cells = _cells(ratio, columns, decimals=2)
            table.add_row("", f"{next(iter(row.medians))} / {other}", *cells, end_section=last)
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if line.strip()]
    sys.stdout.write("\n".join([f"\n{title}\n", *lines, ""]))


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print each aim with what was measured."""
    sys.stdout.write("\n".join(["\nAims\n", *(f"- {verdict.sentence()}" for verdict in verdicts), ""]))


def save(report: bytes, file: Path) -> None:
    """Write the JSON document, making its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(report)


def _cells(figures: Figures, columns: dict[str, str], decimals: int | None = None) -> list[str]:
    return [shown(figures.get(name), decimals) for name in columns]


def shown(value: float | None, decimals: int | None = None) -> str:
    """Return three figures of a number, or as many decimals as asked for; a dash for None."""
    if value is None:
        return "-"
    if decimals is None:
        decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f}"

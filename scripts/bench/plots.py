"""The pictures of docs/benchmarks.md: latency against load, and memory over time. They need matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figures, Row
from bench.processes import BenchError

_LATENCIES = {
    "time_to_first_token_p50_ms": "first token p50, ms",
    "time_to_first_token_p99_ms": "first token p99, ms",
    "inter_token_latency_p50_ms": "between tokens p50, ms",
    "latency_p99_ms": "whole answer p99, ms",
}
_MEMORY = {"api_rss_mib": "API MiB", "engine_rss_mib": "engine MiB"}


def check_plots() -> None:
    """Raise `BenchError` where no pictures can be made: before the measuring, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: .venv/bin/python -m pip install matplotlib")


def save_chat_plot(rows: Sequence[Row], file: Path) -> None:
    """Draw the streamed rows of `bench chat`, latency against requests/s, one line per target, and write a PNG."""
    plot = _pyplot()
    figure, panels = plot.subplots(2, 2, figsize=(13, 9), layout="constrained")
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
    _save(plot, figure, file)


def save_memory_plot(levels: Sequence[Figures], file: Path) -> None:
    """Draw the memory of `bench soak` over time and write a PNG."""
    plot = _pyplot()
    figure, panels = plot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    minutes = [(level["seconds"] or 0.0) / 60 for level in levels]
    for panel, (name, heading) in zip(panels, _MEMORY.items(), strict=True):
        panel.plot(minutes, [level[name] for level in levels])
        panel.set(ylabel=heading)
        panel.grid(visible=True, alpha=0.25)
    panels[-1].set(xlabel="minutes")
    _save(plot, figure, file)


def _pyplot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(plot: Any, figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)

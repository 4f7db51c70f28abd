"""A picture of `bench chat`: latency against load, one line per target."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.chat_cases import Load
    from benchmarks.compare import Row

_PANELS = {
    "time_to_first_token_p50_ms": "first token p50, ms",
    "time_to_first_token_p99_ms": "first token p99, ms",
    "inter_token_latency_p50_ms": "between tokens p50, ms",
    "latency_p95_ms": "whole answer p95, ms",
}
_WAYS = {"closed loop": "-o", "open loop": "--s"}


def check_plots() -> None:
    """Raise `BenchError` where no pictures can be made: before the measuring, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: .venv/bin/python -m pip install matplotlib")


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files."""
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def points(rows: Sequence[tuple[Load, Row]], figure: str, target: str, way: str) -> list[tuple[float, float, str]]:
    """Return (requests/s, figure, label) of the streamed rows of one way to send, by rising load."""
    found = []
    for load, row in rows:
        middle = row.medians[target]
        speed, value = middle["requests_per_second"], middle.get(figure)
        if load.streamed and load.way == way and speed is not None and value is not None:
            found.append((load.size, speed, value, load.short))
    return [(speed, value, short) for _, speed, value, short in sorted(found)]


def save_plot(rows: Sequence[tuple[Load, Row]], file: Path) -> None:
    """Draw the streamed rows and write a PNG, making its folder."""
    plot = pyplot()
    figure, panels = plot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    targets = list(rows[0][1].medians)
    for panel, (name, heading) in zip(panels.flat, _PANELS.items(), strict=True):
        for number, target in enumerate(targets):
            for way, style in _WAYS.items():
                found = points(rows, name, target, way)
                if not found:
                    continue
                speeds, values, labels = zip(*found, strict=True)
                panel.plot(speeds, values, style, color=f"C{number}", label=f"{target}, {way}", markersize=4)
                for speed, value, label in zip(speeds, values, labels, strict=True):
                    panel.annotate(label, (speed, value), fontsize=7, xytext=(3, 3), textcoords="offset points")
        panel.set(title=heading, xlabel="requests/s answered", yscale="log")
        for which in ("major", "minor"):
            getattr(panel.yaxis, f"set_{which}_formatter")("{x:g}")
        panel.grid(visible=True, which="both", alpha=0.25)
    panels.flat[0].legend(fontsize=8)
    figure.suptitle("Streamed chat: latency against load (points: requests in flight, or requests/s asked for)")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)

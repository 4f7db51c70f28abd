"""The statistics of all benchmarks: percentiles of one run, medians over runs, ratios of two targets."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

# Name with its unit -> value; None where the run has no such thing (a plain answer has no first token).
Figures: TypeAlias = dict[str, float | None]


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return a percentile (1 to 99), interpolated between the two nearest values; None if there are no values."""
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the runs that have it."""
    known = {name: [value for run in runs if (value := run.get(name)) is not None] for name in runs[0]}
    return {name: statistics.median(values) if values else None for name, values in known.items()}


def ratios(ours: Figures, theirs: Figures) -> Figures:
    """Return ours divided by theirs, figure by figure; None where either is missing or theirs is 0."""
    return {name: _divide(value, theirs.get(name)) for name, value in ours.items()}


def paired_ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """Return, figure by figure, the median of the ratios taken within each repeat.

    A machine that slows down slows both runs of a repeat, and leaves their ratio alone.
    """
    return medians([ratios(mine, other) for mine, other in zip(ours, theirs, strict=True)])


def median_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Return the median of the ratios taken within each repeat, between neighbours; None if there is none."""
    return paired_ratios([{"x": mine} for mine in ours], [{"x": other} for other in theirs])["x"]


def milliseconds(seconds: float | None) -> float | None:
    """Return milliseconds, None for None."""
    return None if seconds is None else seconds * 1000


def _divide(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs

"""The arithmetic of all benchmarks: percentiles of a run, medians over repeats, ratios of two targets, aims."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

# Name with its unit -> value; None where the run has no such thing (a plain answer has no first token).
Figures: TypeAlias = dict[str, float | None]


class Row(msgspec.Struct):
    """One case of a report: every run of each target, their medians, and ratios of the first target to the others."""

    case: str
    runs: dict[str, list[Figures]]
    medians: dict[str, Figures]
    ratios: dict[str, Figures]


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


def divided(ours: float | None, theirs: float | None) -> float | None:
    """Return the ratio; None where either is missing or theirs is 0."""
    return None if ours is None or not theirs else ours / theirs


def paired_ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """Return, figure by figure, the median of the ratios taken within each repeat.

    A machine that slows down slows both runs of a repeat, and leaves their ratio alone.
    """
    pairs = zip(ours, theirs, strict=True)
    return medians([{name: divided(value, other.get(name)) for name, value in mine.items()} for mine, other in pairs])


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


def say(line: str) -> None:
    """Print progress; stdout is for the report."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

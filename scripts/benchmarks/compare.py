"""Measures several targets in turns. What a target is and what it measures is left to each benchmark."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from benchmarks.figures import Figures, medians, paired_ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

J = TypeVar("J")
J_contra = TypeVar("J_contra", contravariant=True)


class Target(Protocol[J_contra]):
    """Something that can be loaded and measured. Only one target works at a time."""

    name: str

    async def measure(self, job: J_contra) -> Figures:
        """Do one run. Raises `BenchError`."""


class Case(msgspec.Struct, Generic[J], frozen=True):
    """One row of the report: `job` makes the work of repeat number n, the same for every target."""

    name: str
    job: Callable[[int], J]


class Row(msgspec.Struct):
    """What came of a case: the runs of each target, their medians, and the first target's ratios to others, by name.

    A ratio is the median of the ratios within each repeat, not the ratio of the medians.
    """

    case: str
    runs: dict[str, list[Figures]]
    medians: dict[str, Figures]
    ratios: dict[str, Figures]

    @property
    def ratio(self) -> Figures:
        """The first of the ratios."""
        return next(iter(self.ratios.values()))


async def compare(targets: Sequence[Target[J]], cases: Sequence[Case[J]], *, repeats: int, headline: str) -> list[Row]:
    """Run every case on every target `repeats` times; progress, with the figure `headline`, goes to stderr.

    Neighbouring runs are the ones compared, so that a machine that slows down slows both; who goes first changes
    from repeat to repeat.
    """
    runs: dict[str, dict[str, list[Figures]]] = {case.name: {target.name: [] for target in targets} for case in cases}
    for repeat in range(repeats):
        for case in cases:
            job = case.job(repeat)
            for target in targets if repeat % 2 == 0 else reversed(targets):
                runs[case.name][target.name].append(await target.measure(job))
            latest = ", ".join(
                f"{target.name} {_shown(runs[case.name][target.name][-1][headline])}" for target in targets
            )
            say(f"  repeat {repeat + 1} of {repeats}, {case.name}: {latest} {headline.replace('_', ' ')}")
    return [row_of(name, of_case) for name, of_case in runs.items()]


def paired(row: Row, ours: str, theirs: str) -> Row:
    """Return two of the targets as a row of their own, with their ratio."""
    return row_of(row.case, {name: row.runs[name] for name in (ours, theirs)})


def row_of(case: str, runs: dict[str, list[Figures]], ours: str | None = None, *others: str) -> Row:
    """Put the runs of a case into a row: medians of all, and ratios of `ours` to `others` (the first to the rest)."""
    first, *rest = (ours, *others) if ours is not None else runs
    middle = {name: medians(runs[name]) for name in dict.fromkeys((first, *rest, *runs))}
    return Row(case, runs, middle, {name: paired_ratios(runs[first], runs[name]) for name in rest})


def say(line: str) -> None:
    """Tell the person at the terminal; stdout is for the report."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

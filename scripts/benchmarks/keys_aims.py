"""What `bench keys` found, and how its aims are judged."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.keys_auth import OPEN, STEP, WITH_KEY
from benchmarks.keys_limits import LIMITED, UNLIMITED
from benchmarks.rank_test import Area, combined
from benchmarks.verdicts import Verdict

if TYPE_CHECKING:
    from benchmarks.compare import Row

_AUTHENTICATION_MS = 0.3
_LIMITS_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """All rows; and per repeat the comparison of refusals, and that of unknown ids with themselves."""

    rows: list[Row]
    areas: list[Area]
    controls: list[Area]

    def row(self, case: str) -> Row:
        """Return the row of a case."""
        return next(row for row in self.rows if row.case == case)


def verdicts(found: Found) -> list[Verdict]:
    """Judge what was found."""
    alone, whole = found.row("step alone").medians[STEP], found.row("HTTP")
    added = difference(whole, WITH_KEY, OPEN, "p50_ms")
    aims = [
        Verdict.at_most("what the step adds to a request's p50 in ms", added, _AUTHENTICATION_MS),
        Verdict.at_most("the same called by itself", alone["p50_ms"], _AUTHENTICATION_MS),
        Verdict.at_most("what it adds to a request's p99 in ms", difference(whole, WITH_KEY, OPEN, "p99_ms"), None),
        *_refusals("wrong secrets from unknown ids", found.areas, judged=True),
        *_refusals("unknown ids from others (the control)", found.controls, judged=False),
    ]
    for row in found.rows:
        if UNLIMITED in row.medians:
            percent = difference(row, LIMITED, UNLIMITED, "cpu_percent_of_one_core")
            what = f"what limits add to the process, {row.case}, in % of one core"
            aims.append(Verdict.at_most(what, percent, _LIMITS_PERCENT))
    return aims


def _refusals(what: str, areas: list[Area], *, judged: bool) -> list[Verdict]:
    """Their times are told apart as soon as the 95 % interval leaves out 0.5, in whichever direction."""
    area = combined(areas)
    interval = f"area {area.value:.4f}, 95 % interval {area.low:.4f} to {area.high:.4f}, p {area.p_value:.2g}"
    told = "told apart" if area.distinguishable else "not told apart"
    name = f"refusals: {what} are {told} by their time ({interval}); distance of 0.5 from the interval"
    outside = max(area.low - 0.5, 0.5 - area.high, 0.0)
    return [Verdict.at_most(name, outside, 0.0 if judged else None)]


def difference(row: Row, ours: str, theirs: str, name: str) -> float | None:
    """Return by how much one target's median is above another's.

    The median over repeats of the differences within each: both were taken side by side.
    """
    sides = zip(row.runs[ours], row.runs[theirs], strict=True)
    known = [(one[name], two[name]) for one, two in sides]
    values = [mine - other for mine, other in known if mine is not None and other is not None]
    return statistics.median(values) if values else None

"""What a server holds at a moment, memory and open files, and how fast memory grows."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.errors import BenchError
from benchmarks.footprint import family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import Figures

_BLOCKS = 24
# Two-sided 95 % of Student's t for 1, 2, ... degrees of freedom; beyond them nearly the normal distribution's.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
_T95_BEYOND = 2.08


@dataclass(frozen=True, slots=True)
class Level:
    """Of the process that speaks HTTP, and of all others together: resident memory and open file descriptors."""

    api_rss_bytes: int
    engine_rss_bytes: int
    api_files: int
    engine_files: int

    @classmethod
    def of(cls, pid: int) -> Level:
        """Read it. Raises `BenchError` when the server has ended."""
        try:
            api, engine = family(pid)
            return cls(
                sum(process.memory_info().rss for process in api),
                sum(process.memory_info().rss for process in engine),
                sum(_files(process.pid) for process in api),
                sum(_files(process.pid) for process in engine),
            )
        except (psutil.Error, OSError) as error:
            raise BenchError(f"A process of the server ended: {error}") from error

    def figures(self) -> Figures:
        """Return it as figures."""
        return {
            "api_rss_mib": self.api_rss_bytes / 2**20,
            "engine_rss_mib": self.engine_rss_bytes / 2**20,
            "api_files": self.api_files,
            "engine_files": self.engine_files,
        }


@dataclass(frozen=True, slots=True)
class Slope:
    """A growth per hour with its 95 % confidence interval."""

    per_hour: float
    plus_minus: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.per_hour - self.plus_minus


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Fit a line by least squares; None with too few values.

    It is fitted to the means of up to 24 blocks: neighbouring samples of one process's memory tell nearly the same,
    and each of them counted as news would make the interval far too narrow.
    """
    blocks = min(_BLOCKS, len(values) // 2)
    if blocks < 3:
        return None
    edges = [round(number * len(values) / blocks) for number in range(blocks + 1)]
    parts = [slice(start, stop) for start, stop in pairwise(edges)]
    times = [statistics.fmean(seconds[part]) / 3600 for part in parts]
    means = [statistics.fmean(values[part]) for part in parts]
    fitted = statistics.linear_regression(times, means)
    rest = sum((mean - fitted.intercept - fitted.slope * at) ** 2 for at, mean in zip(times, means, strict=True))
    spread = sum((at - statistics.fmean(times)) ** 2 for at in times)
    free = blocks - 2
    t = _T95[free - 1] if free <= len(_T95) else _T95_BEYOND
    return Slope(fitted.slope, t * math.sqrt(rest / free / spread))


def _files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())

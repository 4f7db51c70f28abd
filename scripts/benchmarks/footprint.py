"""CPU time and peak memory of a process that owns an engine, between two moments. Linux keeps the books."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

# Children that answer HTTP in their parent's stead: vLLM's Rust front end, whose parent only looks after it.
_FRONT_ENDS = frozenset({"vllm-rs"})


@dataclass(frozen=True, slots=True)
class Footprint:
    """`api` is who speaks HTTP, `engine` what it started: CPU of all of them, peak memory of the largest.

    (The others are the fork server and its like, which share their memory with it.) `pss` is what all of them hold
    together at the end, memory that processes share counted in equal parts.
    """

    api_cpu_seconds: float
    engine_cpu_seconds: float
    api_peak_rss_bytes: int
    engine_peak_rss_bytes: int
    api_pss_bytes: int = 0
    engine_pss_bytes: int = 0


class Meter:
    """Measures the process `pid` and its descendants, from now until `stop`."""

    def __init__(self, pid: int) -> None:
        self._api, self._engine = family(pid)
        for process in (*self._api, *self._engine):
            _reset_peak(process.pid)
        self._api_cpu = sum(map(cpu_seconds, self._api))
        self._engine_cpu = sum(map(cpu_seconds, self._engine))

    def stop(self) -> Footprint:
        """Return what was used since. Raises psutil.Error if a process has ended."""
        return Footprint(
            api_cpu_seconds=sum(map(cpu_seconds, self._api)) - self._api_cpu,
            engine_cpu_seconds=sum(map(cpu_seconds, self._engine)) - self._engine_cpu,
            api_peak_rss_bytes=max(peak_rss_bytes(process.pid) for process in self._api),
            engine_peak_rss_bytes=max((peak_rss_bytes(process.pid) for process in self._engine), default=0),
            api_pss_bytes=sum(pss_bytes(process.pid) for process in self._api),
            engine_pss_bytes=sum(pss_bytes(process.pid) for process in self._engine),
        )


def family(pid: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the processes that speak HTTP, `pid` first, and all others below it. Raises psutil.Error."""
    first = psutil.Process(pid)
    below = first.children(recursive=True)
    others = [process for process in below if process.name() in _FRONT_ENDS]
    return [first, *others], [process for process in below if process not in others]


def pss_bytes(pid: int) -> int:
    """Return the memory that a process holds, its part of what it shares, 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def peak_rss_bytes(pid: int) -> int:
    """Return the most memory that the process has held since the last reset, 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def _reset_peak(pid: int) -> None:
    # Refused in some containers: the peak is then that of the process's whole life.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has used. Raises psutil.Error."""
    times = process.cpu_times()
    return times.user + times.system

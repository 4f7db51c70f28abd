"""CPU time and peak memory of a process that owns an engine, between two moments. Linux keeps the books."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    """`api` is the process with the event loop, `engine` what it started: CPU of all of them, memory of the largest.

    (The others are the fork server and its like, which share their memory with it.)
    """

    api_cpu_seconds: float
    engine_cpu_seconds: float
    api_peak_rss_bytes: int
    engine_peak_rss_bytes: int


class Meter:
    """Measures the process `pid` and its descendants, from now until `stop`."""

    def __init__(self, pid: int) -> None:
        self._api = psutil.Process(pid)
        self._engine = self._api.children(recursive=True)
        for process in (self._api, *self._engine):
            _reset_peak(process.pid)
        self._api_cpu = _cpu_seconds(self._api)
        self._engine_cpu = sum(map(_cpu_seconds, self._engine))

    def stop(self) -> Footprint:
        """Return what was used since. Raises psutil.Error if a process has ended."""
        return Footprint(
            api_cpu_seconds=_cpu_seconds(self._api) - self._api_cpu,
            engine_cpu_seconds=sum(map(_cpu_seconds, self._engine)) - self._engine_cpu,
            api_peak_rss_bytes=peak_rss_bytes(self._api.pid),
            engine_peak_rss_bytes=max((peak_rss_bytes(process.pid) for process in self._engine), default=0),
        )


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


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system

"""Shows how far files are: bars with rate and remaining time in a terminal, now and then a line anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from server.terminal import size_text

_LINE_SECONDS = 10.0


class FileProgress:
    """Told by several threads. `total_bytes` is of all files, `there_bytes` what of it was there before."""

    def __init__(self, what: str, total_bytes: int, there_bytes: int = 0, *, quiet: bool = False) -> None:
        self._what, self._total, self._there, self._quiet = what, total_bytes, there_bytes, quiet
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()
        self._started = self._written_at = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        self._sum = TaskID(0)

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(binary_units=True))
            self._bars = Progress(
                *columns, TransferSpeedColumn(), TimeRemainingColumn(compact=True), console=Console(stderr=True)
            )
            self._sum = self._bars.add_task(self._what, total=self._total, completed=self._there)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def report(self, path: str, done: int, size: int) -> None:
        """As `Report`."""
        with self._lock:
            self._done[path] = done
            if self._bars is not None:
                self._draw(self._bars, path, done, size)
            elif not self._quiet:
                self._write_line(path, done, size)

    def _draw(self, bars: Progress, path: str, done: int, size: int) -> None:
        if path not in self._tasks:
            # What is there already does not count as speed
            self._tasks[path] = bars.add_task(f"  {path}", total=size, completed=done)
        bars.update(self._tasks[path], completed=done, visible=done < size)
        bars.update(self._sum, completed=max(self._there, sum(self._done.values())))

    def _write_line(self, path: str, done: int, size: int) -> None:
        now = time.monotonic()
        together = max(self._there, sum(self._done.values()))
        if done >= size:
            sys.stderr.write(f"{self._what}: {path} ({size_text(size)})\n")
        elif now - self._written_at >= _LINE_SECONDS:
            self._written_at = now
            rate = max(1.0, (together - self._there) / (now - self._started))
            left = (self._total - together) / rate
            sys.stderr.write(
                f"{self._what}: {size_text(together)} of {size_text(self._total)}, {size_text(rate)}/s, "
                f"{left / 60:.0f} min left\n"
            )

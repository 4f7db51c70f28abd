"""Notices processes that hang: stopped, waiting forever, or computing without an end. The caller decides what follows.

The kernel reports when a process dies, but not when it lives and does nothing more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

# While loading, a process may also wait for a slow disk, a lock of a compiler's cache, or its parent.
_LOADING_FACTOR = 4
# A step of a large model on a CPU takes minutes. On a GPU none takes as long, and a kernel that never ends keeps a CPU
# core busy too.
_BUSY_FACTOR_ON_CPU = 20
_BUSY_FACTOR_ON_GPU = 4
_LOOKS = 10  # in the time that a process may stand still
_WORKING_SHARE = 0.01  # of one core: threads that only wait use less
_READING_BYTES_PER_SECOND = 2**18  # a voice or weights from a slow disk; waiting requests read less


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that processes may do nothing while they load, do nothing later, and compute without answering."""

    loading_seconds: float
    still_seconds: float
    busy_seconds: float

    @classmethod
    def of(cls, stall_seconds: float | None, *, on_cpu: bool) -> Self | None:
        """Make it from the `stall_seconds` of models.yaml; None: forever."""
        if stall_seconds is None:
            return None
        busy = stall_seconds * (_BUSY_FACTOR_ON_CPU if on_cpu else _BUSY_FACTOR_ON_GPU)
        return cls(stall_seconds * _LOADING_FACTOR, stall_seconds, busy)


class Guard:
    """Watches the processes `pids` from their start to their end, and those that they start.

    Calls `on_hang` once, with a description for the log. Belongs to the event loop. While they answer, it costs one
    `ping` in a tenth of the patience; only silent processes are examined. A suspended machine or a busy event loop does
    not count as silence: it counts its checks, not the clock.
    """

    def __init__(
        self, patience: Patience | None, pids: Callable[[], Iterable[int]], on_hang: Callable[[str], None]
    ) -> None:
        self._patience, self._pids, self._on_hang = patience, pids, on_hang
        self._task: asyncio.Task[None] | None = None

    def watch(self, ping: Callable[[], Awaitable[object]] | None = None) -> None:
        """From now on they have to answer `ping` between two pieces of work, and to compute during one.

        Without a `ping` they load: they have to compute or to read files.
        """
        self.end()
        if self._patience is not None:
            self._task = asyncio.ensure_future(self._watch(self._patience, ping))

    def end(self) -> None:
        """Watch no more. Safe to call twice, and from `on_hang`."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, patience: Patience, ping: Callable[[], Awaitable[object]] | None) -> None:
        if ping is None:
            never: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            self._on_hang(f"while it loads, {await self._silence(never, patience.loading_seconds, None)}")
            return
        while True:
            answer = asyncio.ensure_future(ping())
            try:
                how = await self._silence(answer, patience.still_seconds, patience.busy_seconds)
            finally:
                answer.cancel()
            if how is not None:
                self._on_hang(how)
                return
            await asyncio.sleep(patience.still_seconds / _LOOKS)

    async def _silence(
        self, answer: asyncio.Future[object], still_seconds: float, busy_seconds: float | None
    ) -> str | None:
        """Wait for the answer. Return how they hang; None if they do not."""
        tick = still_seconds / _LOOKS
        silent = stood = 0.0
        before: _Seen | None = None
        while not (await asyncio.wait({answer}, timeout=tick))[0]:
            seen = await asyncio.to_thread(_look, tuple(self._pids()))
            silent += tick
            stood = stood + tick if before is not None and not seen.works_since(before, tick) else 0.0
            before = seen
            if stood >= still_seconds * (1 - 1 / _LOOKS / 2):
                why = " (it was stopped by a signal)" if seen.stopped else ""
                return f"it has not computed anything for {stood:.0f} s{why}"
            if busy_seconds is not None and silent >= busy_seconds:
                return f"it computes, but has not finished anything for {silent:.0f} s"
        error = answer.exception()
        return None if error is None else f"it takes no more requests ({type(error).__name__})"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of each process: its number, CPU seconds that it used or waited for, and bytes read so far."""

    work: dict[int, tuple[float, int]]
    stopped: bool

    def works_since(self, before: Self, seconds: float) -> bool:
        """Whether they did anything in these seconds. A stopped one stops all: the others wait for it."""
        if not self.work:
            return True  # they have ended, which is reported elsewhere
        if self.stopped:
            return False
        cpu_seconds, read_bytes = 0.0, 0
        for pid, (cpu, read) in self.work.items():
            cpu_before, read_before = before.work.get(pid, (0.0, 0))
            cpu_seconds += cpu - cpu_before
            read_bytes += read - read_before
        return cpu_seconds > seconds * _WORKING_SHARE or read_bytes > seconds * _READING_BYTES_PER_SECOND


def _look(pids: tuple[int, ...]) -> _Seen:
    """Read all of them. Blocks: finding children means reading all processes of the machine."""
    work: dict[int, tuple[float, int]] = {}
    stopped = False
    family: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            family += [process, *process.children(recursive=True)]
    for member in family:
        with suppress(psutil.Error), member.oneshot():
            stopped = member.status() == psutil.STATUS_STOPPED or stopped
            times, in_line = member.cpu_times(), _seconds_in_line(member.pid)
            work[member.pid] = (times.user + times.system + in_line, _read_bytes(member))
    return _Seen(work, stopped)


def _seconds_in_line(pid: int) -> float:
    """How long its threads were ready to run while others ran: a starved process on a busy machine does not hang.

    Source: the second number of `schedstat`, Documentation/scheduler/sched-stats.rst of Linux.
    """
    nanoseconds = 0
    with suppress(OSError, ValueError, IndexError):  # it has ended, or this kernel does not count
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _read_bytes(process: psutil.Process) -> int:
    """Return the bytes read, also those of mapped files, as weights are."""
    with suppress(psutil.Error, NotImplementedError, OSError):  # not everywhere allowed
        counted = process.io_counters()
        return int(counted.read_bytes + counted.read_chars)
    return 0

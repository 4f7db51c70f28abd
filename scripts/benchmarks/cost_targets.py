"""What `bench cost` measures on one running server: processor time under load, and counts of single requests."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import psutil

from benchmarks.chat_job import Measurement
from benchmarks.chat_targets import START_SECONDS, ServerTarget, load_generator
from benchmarks.cost_server import COUNTS_VARIABLE, SIGNAL, Counts
from benchmarks.errors import BenchError
from benchmarks.hearth import HearthServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from benchmarks.chat_job import ChatJob
    from benchmarks.children import Child
    from benchmarks.cost_cases import CostJob
    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

NOW = "now"
_COMMAND = (sys.executable, "-m", "benchmarks.cost_server", "serve", "--port", "0")
_SIGNAL_SECONDS = 30.0
_POLL_SECONDS = 0.01


class Processor:
    """Measures processor time."""

    name = NOW

    def __init__(self, server: ServerTarget) -> None:
        self._server = server

    async def measure(self, job: CostJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        figures = await self._server.measure(job.chat)
        # Of one token a request costs all that there is, and of many next to nothing.
        unit = "api_cpu_ms_per_1000_tokens" if job.chat.max_tokens > 1 else "api_cpu_ms_per_request"
        return {name: figures[name] for name in (unit, "requests_per_second", "tokens_per_event")}


class Counter:
    """Counts function calls and writes."""

    name = NOW

    def __init__(self, pid: int, load: Child, file: Path) -> None:
        self._pid = pid
        self._load = load
        self._file = file
        self._signals = 0

    async def measure(self, job: CostJob) -> Figures:
        """Do one run, of a `further` job two. Raises `BenchError`."""
        whole, seen = await self._counted(job.chat)
        if not job.further:
            return _each(whole, job.chat.requests)
        first, _ = await self._counted(msgspec.structs.replace(job.chat, max_tokens=1))
        more = {name: _less(value, first[name]) for name, value in whole.items()}
        # More of them than in another run: the process fell behind, steps were merged, and a token looks cheaper.
        merged = seen.completion_tokens / seen.text_events if seen.text_events else None
        return _each(more, job.chat.requests * (job.chat.max_tokens - 1)) | {"tokens_per_event": merged}

    async def _counted(self, job: ChatJob) -> tuple[Figures, Measurement]:
        await self._signal()
        writes = _writes(self._pid)
        seen = await self._load.run(job, Measurement)
        made = _less(_writes(self._pid), writes)
        counts = await self._signal()
        return {"python_calls": counts.python, "native_calls": counts.native, "write_calls": made}, seen

    async def _signal(self) -> Counts:
        """Begin or end the counting; return once the server has done so. Raises `BenchError`."""
        self._signals += 1
        try:
            os.kill(self._pid, SIGNAL)
        except ProcessLookupError:
            raise BenchError("The server ended while it was measured.") from None
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while time.monotonic() < deadline:
            if self._file.exists():
                counts = msgspec.json.decode(self._file.read_bytes(), type=Counts)
                if counts.signals == self._signals:
                    return counts
            await asyncio.sleep(_POLL_SECONDS)
        raise BenchError(f"The server did not begin or end its counting within {_SIGNAL_SECONDS:.0f} s.")


@asynccontextmanager
async def cost_targets(place: Workplace) -> AsyncIterator[tuple[Processor, Counter]]:
    """Start the server and its load generator, and end both in the end. Raises `BenchError`."""
    file = place.folder / "counts.json"
    counting = replace(place, environment=place.environment | {COUNTS_VARIABLE: str(file)})
    server = await HearthServer.start(counting, within_seconds=START_SECONDS, command=_COMMAND)
    try:
        load = await load_generator(place, server, NOW)
    except BaseException:
        await server.stop()
        raise
    target = ServerTarget(NOW, server, load)
    try:
        yield Processor(target), Counter(server.pid, load, file)
    finally:
        await target.stop()


def _writes(pid: int) -> int | None:
    """Return how often a process has called write or its like, None where the kernel does not say."""
    try:
        return int(psutil.Process(pid).io_counters().write_count)
    except (psutil.Error, NotImplementedError, OSError):
        return None


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _each(figures: Figures, number: int) -> Figures:
    return {name: None if value is None else value / number for name, value in figures.items()}

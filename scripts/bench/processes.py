"""Child processes of a benchmark: load generators that take jobs as JSON lines, and what a server uses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

J = TypeVar("J")
R = TypeVar("R")

_LINE_BYTES = 512 * 2**20  # a run has a number per token
_JOB_SECONDS = 3600.0
_STOP_SECONDS = 20.0
_LOG_LINES = 15
# A child that answers HTTP in its parent's stead: vLLM's Rust front end.
_FRONT_ENDS = frozenset({"vllm-rs"})


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""


class Outcome(msgspec.Struct):
    """The result of a job, or the problem that prevented it."""

    result: Any = None
    problem: str | None = None


async def serve_jobs(job_type: type[J], work: Callable[[J], Awaitable[Any]]) -> None:
    """The child's half: do jobs from stdin until it ends."""
    # Our lines get a pipe of their own: libraries may print to stdout.
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            try:
                outcome = Outcome(await work(msgspec.json.decode(line, type=job_type)))
            except BenchError as error:
                outcome = Outcome(problem=str(error))
            _write(answers, msgspec.json.encode(outcome) + b"\n")


def _write(answers: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a pipe may take less than all of it at once
        left = left[answers.write(left) :]


class Child:
    """The parent's half of `serve_jobs`. What the child prints goes to `log`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @classmethod
    async def start(cls, *arguments: str, environment: dict[str, str], log: Path) -> Child:
        """Start `python -m *arguments` in a process of its own."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
            )
        return cls(process, log)

    async def run(self, job: Any, result_type: type[R]) -> R:
        """Have it do one job. Raises `BenchError`."""
        assert self.process.stdin is not None and self.process.stdout is not None  # noqa: S101, PT018  # opened above
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")
        try:
            async with asyncio.timeout(_JOB_SECONDS):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise BenchError(f"The load generator gave no sign for {_JOB_SECONDS:.0f} s.{tail(self._log)}") from None
        if not line:
            raise BenchError(f"The load generator ended by itself.{tail(self._log)}")
        outcome = msgspec.json.decode(line, type=Outcome)
        if outcome.problem is not None:
            raise BenchError(f"The load generator reports: {outcome.problem}{tail(self._log)}")
        return msgspec.convert(outcome.result, result_type)

    async def stop(self) -> None:
        """Terminate it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await end(self.process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end; after a while kill it with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def tail(log: Path) -> str:
    """Return the end of a log for an error message."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return "\n" + "\n".join(f"  | {line}" for line in lines) if lines else ""


@dataclass(frozen=True, slots=True)
class Usage:
    """`api` is what speaks HTTP, `engine` everything below it. PSS counts shared memory in equal parts."""

    api_cpu_seconds: float
    engine_cpu_seconds: float
    api_pss_bytes: int
    engine_pss_bytes: int


class Meter:
    """Measures the process `pid` and its descendants, from now until `stop`."""

    def __init__(self, pid: int) -> None:
        self._api, self._engine = family(pid)
        self._before = cpu_seconds(self._api), cpu_seconds(self._engine)

    def stop(self) -> Usage:
        """Return what was used since. Raises `BenchError` if a process has ended."""
        api, engine = self._before
        return Usage(
            cpu_seconds(self._api) - api,
            cpu_seconds(self._engine) - engine,
            sum(pss_bytes(process.pid) for process in self._api),
            sum(pss_bytes(process.pid) for process in self._engine),
        )


def family(pid: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the processes that speak HTTP, `pid` first, and all others below it. Raises `BenchError`."""
    try:
        first = psutil.Process(pid)
        below = first.children(recursive=True)
        front = [process for process in below if process.name() in _FRONT_ENDS]
    except psutil.Error as error:
        raise BenchError(f"A process of the server ended: {error}") from error
    return [first, *front], [process for process in below if process not in front]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the processor time that processes have used together. Raises `BenchError` if one has ended."""
    try:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
    except psutil.Error as error:
        raise BenchError(f"A process of the server ended while it was measured: {error}") from error


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, its part of what it shares, 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0

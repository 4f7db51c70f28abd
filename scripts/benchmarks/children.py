"""Processes that take jobs: one JSON line in, one JSON line out. Both halves, so that they cannot disagree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from io import FileIO
    from pathlib import Path

J = TypeVar("J")
R = TypeVar("R")

_LINE_BYTES = 256 * 2**20  # a run has a number per token
_JOB_SECONDS = 600.0
_STOP_SECONDS = 20.0
_LOG_LINES = 15


class Outcome(msgspec.Struct):
    """What a job came to, or the problem that kept it from that. The first line of all says `ready`."""

    result: Any = None
    problem: str | None = None


async def serve_jobs(
    job_type: type[J], work: Callable[[J], Awaitable[Any]], *, prepare: Callable[[], Awaitable[None]] | None = None
) -> None:
    """The child's half: prepare, say so, and do jobs until stdin ends."""
    # Our lines get a pipe of their own: libraries, and processes that they start, may print to stdout.
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        if prepare is not None:
            _write(answers, await _outcome(prepare()))
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            _write(answers, await _outcome(work(msgspec.json.decode(line, type=job_type))))


async def _outcome(work: Awaitable[Any]) -> Outcome:
    try:
        return Outcome(await work)
    except BenchError as error:
        return Outcome(problem=str(error))


def _write(answers: FileIO, outcome: Outcome) -> None:
    left = memoryview(msgspec.json.encode(outcome) + b"\n")
    while left:  # a pipe may take less than all of it at once
        left = left[answers.write(left) :]


class Child:
    """The parent's half. What the child prints goes to `log`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self._log = log

    @classmethod
    async def start(cls, name: str, module: str, *arguments: str, environment: dict[str, str], log: Path) -> Child:
        """Start `module` of this package in a process of its own."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
            )
        return cls(name, process, log)

    async def prepared(self, within_seconds: float) -> None:
        """Wait for a child that prepares itself. Raises `BenchError`."""
        await self._outcome(within_seconds)

    async def run(self, job: Any, result_type: type[R]) -> R:
        """Let it do one job. Raises `BenchError`."""
        assert self.process.stdin is not None  # noqa: S101  # opened above
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")
        return msgspec.convert(await self._outcome(_JOB_SECONDS), result_type)

    async def stop(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await end(self.process)

    async def _outcome(self, within_seconds: float) -> Any:
        assert self.process.stdout is not None  # noqa: S101  # opened above
        try:
            async with asyncio.timeout(within_seconds):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise BenchError(
                f"The {self.name} gave no sign for {within_seconds:.0f} s.{tail(self._log)}\n"
                "Stop what else keeps this machine busy, or give it less with --streams and --max-tokens."
            ) from None
        if not line:
            with contextlib.suppress(TimeoutError):  # its last words come after its last line
                async with asyncio.timeout(_STOP_SECONDS):
                    await self.process.wait()
            raise BenchError(f"The {self.name} ended by itself.{tail(self._log)}")
        outcome = msgspec.json.decode(line, type=Outcome)
        if outcome.problem is not None:
            raise BenchError(f"The {self.name} reports: {outcome.problem}{tail(self._log)}")
        return outcome.result


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

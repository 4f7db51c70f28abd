"""`bench many`: a burst of thousands; what fails, and whether memory comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from bench import report
from bench.load import LoadResult
from bench.servers import Server, family, say

_WARM_STREAMS = 256
_SETTLE_SECONDS = 45.0
_RESTS_SECONDS = 12  # the server gives back what it does not need every 10 s
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Many(report.Benchmark):
    """Send thousands of requests at once: each is answered or refused with Retry-After, and memory comes back."""

    requests: Annotated[int, typer.Option(min=1, help="Streamed requests at the same moment.")] = 2000
    max_tokens: report.MaxTokens = 64
    repeats: report.Repeats = 3
    method = "one burst after the other; levels read once memory and open files have stopped falling"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            await self._burst(server, "warm", min(_WARM_STREAMS, self.requests))
            before = await _settled(server.pid)
            bursts: list[report.Figures] = []
            for number in range(self.repeats):
                seen = await self._burst(server, f"many {number}", self.requests)
                say(f"  burst {number + 1}: {seen['answered']:.0f} answered, {seen['wrong']:.0f} wrong")
                bursts.append(seen | await _settled(server.pid))
        row = report.row_of("burst", {"after": bursts, "before": [before] * self.repeats})
        whole.tables = [(f"{self.requests} requests at once", [row])]
        return whole

    async def _burst(self, server: Server, label: str, requests: int) -> report.Figures:
        how: dict[str, Any] = {"streams": requests, "requests": requests, "strict": False}
        result, _ = await server.measure(server.chat(label, self.max_tokens, **how))
        return outcome(result)


def outcome(result: LoadResult) -> report.Figures:
    """Put what became of the requests into figures; a few that went wrong are shown."""
    stayed = [answer for answer in result.answers if not answer.left]
    refused = [answer for answer in stayed if answer.refused]
    wrong = [answer for answer in stayed if not answer.refused and answer.problem]
    good = [answer for answer in stayed if not answer.problem]
    for answer in wrong[:_SHOWN]:
        say(f"  {answer.problem}")
    return {
        "answered": len(good),
        "refused": len(refused),
        "left": len(result.answers) - len(stayed),
        "wrong": len(wrong),
        **report.percentiles_ms("answered", [answer.seconds for answer in good], 50, 99),
        **report.percentiles_ms("refused", [answer.seconds for answer in refused], 50, 99),
        "wall_seconds": result.wall_seconds,
    }


def level(pid: int) -> report.Figures:
    """Return resident memory and open files of the server's processes. Raises `psutil.Error` when it has ended."""
    api, engine = family(pid)
    return {
        "api_rss_mib": sum(process.memory_info().rss for process in api) / 2**20,
        "engine_rss_mib": sum(process.memory_info().rss for process in engine) / 2**20,
        "api_files": sum(process.num_fds() for process in api),
        "engine_files": sum(process.num_fds() for process in engine),
    }


async def _settled(pid: int) -> report.Figures:
    """Return the level once it has stopped falling, or after a while as it is."""
    lowest, since, deadline = level(pid), 0, time.monotonic() + _SETTLE_SECONDS
    while since < _RESTS_SECONDS and time.monotonic() < deadline:
        await asyncio.sleep(1)
        now = level(pid)
        fell = any((now[name] or 0) < (lowest[name] or 0) for name in ("api_rss_mib", "api_files"))
        since, lowest = (0, now) if fell else (since + 1, lowest)
    return level(pid)

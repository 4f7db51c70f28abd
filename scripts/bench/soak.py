"""`bench many` and `bench soak`: a burst of thousands, and a long load; what fails, and what memory does."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import report
from bench.load import TEXT, LoadJob, LoadResult, chat_body
from bench.servers import Server, family, say

_LEVELS = ("api_rss_mib", "engine_rss_mib", "api_files", "engine_files")
_MEMORY = {"api_rss_mib": "API MiB", "engine_rss_mib": "engine MiB"}
_WARM_STREAMS = 256
_SETTLE_SECONDS = 45.0
_RESTS_SECONDS = 12  # the server gives back what it does not need every 10 s
_SLICE_SECONDS = 60.0
_SAMPLE_SECONDS = 2.0
_SETTLING_PART = 0.25  # of a soak: pools fill and caches grow to their limits
_BODIES = 256
_MAX_SENTENCES = 8
_LEAVES_SECONDS = 0.5
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


@dataclass(frozen=True, kw_only=True)
class Soak(report.Benchmark):
    """Keep a server busy with clients of whom some disconnect, and see whether its memory grows."""

    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32
    leaving: Annotated[float, typer.Option(min=0, max=1, help="Part of the clients that disconnect.")] = 0.2
    max_tokens: report.MaxTokens = 64
    plot: Annotated[Path | None, typer.Option(help="Draw memory over time into this PNG file.")] = None
    method = "closed loop, streamed and plain in turn, varying lengths; slopes without the first quarter"

    async def measure(self) -> report.Report:
        slices: list[report.Figures] = []
        levels: list[report.Figures] = []
        async with self.one_server() as (whole, server):
            began = time.monotonic()
            sampling = asyncio.create_task(_sample(server.pid, levels))
            try:
                while (left := self.minutes * 60 - (time.monotonic() - began)) > 0:
                    job = self._job(server, len(slices), min(left, _SLICE_SECONDS))
                    slices.append(outcome((await server.measure(job))[0]))
                    wrong = slices[-1]["wrong"] or 0
                    say(f"  minute {len(slices)}: API {levels[-1]['api_rss_mib'] or 0:.1f} MiB, {wrong:.0f} wrong")
                    if sampling.done():
                        sampling.result()
            finally:
                sampling.cancel()
        minutes = report.row_of("minute", {"hearth": slices})
        found = {"level": levels, "more per hour": [growth(levels)]}
        held = [report.row_of(case, {"hearth": figures}) for case, figures in found.items()]
        whole.tables = [("Requests of a minute", [minutes]), ("Memory and files", held)]
        for name, heading in _MEMORY.items():
            whole.panels[heading] = {"hearth": [((one["seconds"] or 0.0) / 60, one[name], "") for one in levels]}
        whole.axes["xlabel"] = "minutes"
        return whole

    def _job(self, server: Server, number: int, seconds: float) -> LoadJob:
        """Return the load of one minute.

        The lengths of prompts and answers vary: an engine keeps something for every size of a step that it has seen,
        and a load of one size would never fill what it keeps.
        """
        source = random.Random(number)  # noqa: S311  # repeatable on purpose
        bodies = [
            chat_body(
                server.model,
                source.randint(1, 2 * self.max_tokens),
                streamed=index % 2 == 0,
                text=" ".join([TEXT] * source.randint(1, _MAX_SENTENCES)),
            )
            for index in range(_BODIES)
        ]
        leaves = [
            source.uniform(0, _LEAVES_SECONDS) if source.random() < self.leaving else None for _ in range(_BODIES - 1)
        ]
        how: dict[str, Any] = {"streams": self.streams, "seconds": seconds, "strict": False}
        return server.job(f"soak {number}", bodies, leave_after_seconds=leaves, **how)


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


def growth(levels: Sequence[report.Figures]) -> report.Figures:
    """Return how much memory and how many files more per hour, without the first quarter, in which caches fill."""
    late = levels[int(len(levels) * _SETTLING_PART) :]
    hours = [(one["seconds"] or 0.0) / 3600 for one in late]
    if len(late) < 2:
        return dict.fromkeys(_LEVELS)
    return {name: statistics.linear_regression(hours, [one[name] or 0.0 for one in late]).slope for name in _LEVELS}


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


async def _sample(pid: int, levels: list[report.Figures]) -> None:
    began = time.monotonic()
    while True:
        levels.append(level(pid) | {"seconds": time.monotonic() - began})
        await asyncio.sleep(_SAMPLE_SECONDS)

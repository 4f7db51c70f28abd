"""`bench many` and `bench soak`: a burst of thousands, and a long load; what fails, and what memory does."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from bench.chat import TEXT, chat_body, chat_job
from bench.figures import Figures, percentiles_ms, row_of, say
from bench.hearth import HearthServer, Workspace, load_generator, open_workspace, running
from bench.load import LoadJob, LoadResult
from bench.plots import check_plots, save_memory_plot
from bench.processes import BenchError, family
from bench.report import JsonFile, MaxTokens, Model, Models, Repeats, Report, WeightsDir, conditions, ending_cleanly

_LEVELS = ("api_rss_mib", "engine_rss_mib", "api_files", "engine_files")
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


@dataclass(frozen=True, slots=True)
class ManySettings:
    """What `bench many` measures."""

    requests: int
    max_tokens: int
    repeats: int
    method: str = "one burst after the other; levels read once memory and open files have stopped falling"


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """What `bench soak` measures. `leaving` is the part of the clients that disconnect."""

    minutes: float
    streams: int
    leaving: float
    max_tokens: int
    method: str = "closed loop, streamed and plain in turn, varying lengths; slopes without the first quarter"


def many(  # noqa: PLR0913  # one argument per option
    *,
    model: Model = "service-plus",
    models: Models = Path("models.yaml"),
    weights_dir: WeightsDir = None,
    requests: Annotated[int, typer.Option(min=1, help="Streamed requests at the same moment.")] = 2000,
    max_tokens: MaxTokens = 64,
    repeats: Repeats = 3,
    json: JsonFile = None,
) -> None:
    """Send thousands of requests at once: each is answered or refused with Retry-After, and memory comes back."""
    settings = ManySettings(requests, max_tokens, repeats)
    with ending_cleanly(), open_workspace(models, model, weights_dir) as place:
        asyncio.run(_many(settings, place)).deliver(json)


def soak(  # noqa: PLR0913  # one argument per option
    *,
    model: Model = "service-plus",
    models: Models = Path("models.yaml"),
    weights_dir: WeightsDir = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    leaving: Annotated[float, typer.Option(min=0, max=1, help="Part of the clients that disconnect.")] = 0.2,
    max_tokens: MaxTokens = 64,
    json: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory over time into this PNG file.")] = None,
) -> None:
    """Keep a server busy with clients of whom some disconnect, and see whether its memory grows."""
    settings = SoakSettings(minutes, streams, leaving, max_tokens)
    with ending_cleanly(), open_workspace(models, model, weights_dir) as place:
        if plot is not None:
            check_plots()
        report = asyncio.run(_soak(settings, place))
        report.deliver(json)
        if plot is not None:
            save_memory_plot(report.tables[1][1][0].runs["hearth"], plot)


async def _many(settings: ManySettings, place: Workspace) -> Report:
    report = Report("many", asdict(settings), conditions(place))
    async with running(HearthServer.launch(place)) as (server,), load_generator(place) as load:

        async def burst(label: str, requests: int) -> Figures:
            how: dict[str, Any] = {"label": label, "streams": requests, "requests": requests, "strict": False}
            job = chat_job(server, place.model, settings.max_tokens, **how)
            return outcome(await load.run(job, LoadResult))

        await burst("warm", min(_WARM_STREAMS, settings.requests))
        before = await _settled(server.pid)
        bursts: list[Figures] = []
        for number in range(settings.repeats):
            seen = await burst(f"many {number}", settings.requests)
            say(f"  burst {number + 1}: {seen['answered']:.0f} answered, {seen['wrong']:.0f} wrong")
            bursts.append(seen | await _settled(server.pid))
    row = row_of("burst", {"after": bursts, "before": [before] * settings.repeats})
    report.tables = [(f"{settings.requests} requests at once", [row])]
    return report


async def _soak(settings: SoakSettings, place: Workspace) -> Report:
    report = Report("soak", asdict(settings), conditions(place))
    slices: list[Figures] = []
    levels: list[Figures] = []
    async with running(HearthServer.launch(place)) as (server,), load_generator(place) as load:
        began = time.monotonic()
        sampling = asyncio.create_task(_sample(server.pid, levels))
        try:
            while (left := settings.minutes * 60 - (time.monotonic() - began)) > 0:
                job = soak_job(settings, server, place.model, len(slices), min(left, _SLICE_SECONDS))
                slices.append(outcome(await load.run(job, LoadResult)))
                wrong = slices[-1]["wrong"] or 0
                say(f"  minute {len(slices)}: API {levels[-1]['api_rss_mib'] or 0:.1f} MiB, {wrong:.0f} wrong")
                if sampling.done():
                    sampling.result()
        finally:
            sampling.cancel()
    held = [row_of("level", {"hearth": levels}), row_of("more per hour", {"hearth": [growth(levels)]})]
    report.tables = [("Requests of a minute", [row_of("minute", {"hearth": slices})]), ("Memory and files", held)]
    return report


def soak_job(settings: SoakSettings, server: HearthServer, model: str, number: int, seconds: float) -> LoadJob:
    """Return the load of one minute.

    The lengths of prompts and answers vary: an engine keeps something for every size of a step that it has seen, and
    a load of one size would never fill what it keeps.
    """
    source = random.Random(number)  # noqa: S311  # repeatable on purpose
    bodies = [
        chat_body(
            model,
            source.randint(1, 2 * settings.max_tokens),
            streamed=index % 2 == 0,
            text=" ".join([TEXT] * source.randint(1, _MAX_SENTENCES)),
        )
        for index in range(_BODIES)
    ]
    leaves = [
        source.uniform(0, _LEAVES_SECONDS) if source.random() < settings.leaving else None for _ in range(_BODIES - 1)
    ]
    how: dict[str, Any] = {
        "streams": settings.streams,
        "seconds": seconds,
        "leave_after_seconds": leaves,
        "strict": False,
    }
    return LoadJob(server.host, server.port, server.key, f"soak {number}", bodies, **how)


def outcome(result: LoadResult) -> Figures:
    """Put what became of the requests into figures; a few that went wrong are shown."""
    left = [answer for answer in result.answers if answer.left]
    refused = [answer for answer in result.answers if not answer.left and answer.refused]
    wrong = [answer for answer in result.answers if not answer.left and not answer.refused and answer.problem]
    good = [answer for answer in result.answers if not answer.left and not answer.problem]
    for answer in wrong[:_SHOWN]:
        say(f"  {answer.problem}")
    return {
        "answered": len(good),
        "refused": len(refused),
        "left": len(left),
        "wrong": len(wrong),
        **percentiles_ms("answered", [answer.seconds for answer in good], 50, 99),
        **percentiles_ms("refused", [answer.seconds for answer in refused], 50, 99),
        "wall_seconds": result.wall_seconds,
    }


def growth(levels: Sequence[Figures]) -> Figures:
    """Return how much memory and how many files more per hour, without the first quarter, in which caches fill."""
    late = levels[int(len(levels) * _SETTLING_PART) :]
    hours = [(one["seconds"] or 0.0) / 3600 for one in late]
    if len(late) < 2:
        return dict.fromkeys(_LEVELS)
    return {name: statistics.linear_regression(hours, [one[name] or 0.0 for one in late]).slope for name in _LEVELS}


def level(pid: int) -> Figures:
    """Return resident memory and open files of the server's processes. Raises `BenchError` when it has ended."""
    try:
        api, engine = family(pid)
        return {
            "api_rss_mib": sum(process.memory_info().rss for process in api) / 2**20,
            "engine_rss_mib": sum(process.memory_info().rss for process in engine) / 2**20,
            "api_files": sum(process.num_fds() for process in api),
            "engine_files": sum(process.num_fds() for process in engine),
        }
    except psutil.Error as error:
        raise BenchError(f"A process of the server ended: {error}") from error


async def _settled(pid: int) -> Figures:
    """Return the level once it has stopped falling, or after a while as it is. Raises `BenchError`."""
    lowest, since, deadline = level(pid), 0, time.monotonic() + _SETTLE_SECONDS
    while since < _RESTS_SECONDS and time.monotonic() < deadline:
        await asyncio.sleep(1)
        now = level(pid)
        fell = any((now[name] or 0) < (lowest[name] or 0) for name in ("api_rss_mib", "api_files"))
        since, lowest = (0, now) if fell else (since + 1, lowest)
    return level(pid)


async def _sample(pid: int, levels: list[Figures]) -> None:
    began = time.monotonic()
    while True:
        levels.append(level(pid) | {"seconds": time.monotonic() - began})
        await asyncio.sleep(_SAMPLE_SECONDS)

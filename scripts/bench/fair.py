"""`bench fair`: one key floods a small server; what another key feels of it, with the fair queue and without."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from bench import report
from bench.load import LoadResult, beats
from bench.servers import HearthServer, Target, Workspace, create_key, open_workspace, running, say

FAIR, FIRST_COME, B_ALONE, A_ALONE, A_ALONE_FIRST_COME = (
    "A and B, fair",
    "A and B, first come",
    "B alone",
    "A alone, fair",
    "A alone, first come",
)
_QUEUE = 512
_LEAD_SECONDS = 2.0  # the flood fills the queue before B asks
_REST_SECONDS = 2.0  # for what is left of the flood, which has disconnected
# A clock that beats as evenly as the flood's rounds would meet each of them at the same place.
_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. `seconds` is how long B sends in one run, `flood` how many requests A has in flight."""

    places: int
    flood: int
    every_seconds: float
    repeats: int
    seconds: float
    max_tokens: int
    method: str = "A: closed loop; B: open loop; targets in turns, medians of the repeats"


def fair(  # noqa: PLR0913  # one argument per option
    *,
    model: report.Model = "service-plus",
    models: report.Models = Path("models.yaml"),
    weights_dir: report.WeightsDir = None,
    places: Annotated[int, typer.Option(min=2, help="Requests generated at the same time (max_num_seqs).")] = 4,
    flood: Annotated[int, typer.Option(min=1, max=_QUEUE, help="Requests that A keeps in flight.")] = 200,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two requests of B.")] = 1.0,
    repeats: report.Repeats = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long B sends in one run.")] = 20.0,
    max_tokens: report.MaxTokens = 64,
    json: report.JsonFile = None,
) -> None:
    """Measure what one key's flood does to another key, with the fair queue and first come, first served."""
    settings = Settings(places, flood, every, repeats, seconds, max_tokens)
    small = {"max_num_seqs": places, "max_queued_requests": _QUEUE}
    unfair = small | {"fair_queue": False, "kept_for_newcomers": 0}
    with ExitStack() as stack:
        one, other = [
            stack.enter_context(open_workspace(models, model, weights_dir, engine=engine))
            for engine in (small | {"fair_queue": True}, unfair)
        ]
        asyncio.run(_benchmark(settings, one, other)).deliver(json)


async def _benchmark(settings: Settings, one: Workspace, other: Workspace) -> report.Report:
    whole = report.begin("fair", settings, one)
    say("Starting two servers, one with the fair queue and one without.")
    async with running(one, partial(HearthServer.launch, one), partial(HearthServer.launch, other)) as targets:
        fairly, first_come = [
            partial(_measure, target, await create_key(place, "second"))
            for place, target in zip((one, other), targets, strict=True)
        ]
        # In this order (and back), those that are compared with each other are neighbours.
        runs = {
            B_ALONE: partial(fairly, settings, flooded=False, asked=True),
            FAIR: partial(fairly, settings, flooded=True, asked=True),
            A_ALONE: partial(fairly, settings, flooded=True, asked=False),
            A_ALONE_FIRST_COME: partial(first_come, settings, flooded=True, asked=False),
            FIRST_COME: partial(first_come, settings, flooded=True, asked=True),
        }
        for measure in (fairly, first_come):  # warms up
            await measure(replace(settings, seconds=_LEAD_SECONDS), -1, flooded=True, asked=True)
        say("Measuring:")
        row = await report.in_turns("flood", runs, repeats=settings.repeats, headline="b_latency_p95_ms")
    whole.tables = [
        ("What B feels", [_pair(row, FAIR, B_ALONE), _pair(row, FIRST_COME, B_ALONE)]),
        ("What A gets", [_pair(row, FAIR, A_ALONE), _pair(row, A_ALONE, A_ALONE_FIRST_COME)]),
    ]
    return whole


async def _measure(  # noqa: PLR0913
    target: Target, second_key: str, settings: Settings, repeat: int, *, flooded: bool, asked: bool
) -> report.Figures:
    """Do one run of A (the server's own key), of B (`second_key`) or of both. Raises `BenchError`."""
    label = f"{repeat}{flooded}{asked}"
    job = target.server.chat(
        f"{label}b",
        settings.max_tokens,
        key=second_key,
        moments=beats(settings.seconds, settings.every_seconds, repeat, _JITTER) if asked else [],
        seconds=settings.seconds,
        beside=target.server.chat(f"{label}a", settings.max_tokens, streams=settings.flood) if flooded else None,
        lead_seconds=_LEAD_SECONDS,
    )
    result, _ = await target.measure(job)
    await asyncio.sleep(_REST_SECONDS)
    return fair_figures(result)


def _pair(row: report.Row, ours: str, theirs: str) -> report.Row:
    return report.row_of(f"{ours} / {theirs}", {name: row.runs[name] for name in (ours, theirs)})


def fair_figures(result: LoadResult) -> report.Figures:
    """Put a run into figures; None for the key that sent nothing."""
    flood = result.beside
    return {
        "b_requests": len(result.answers) or None,
        **report.percentiles_ms("b_latency", result.latencies, 50, 95, 99),
        **report.percentiles_ms("b_time_to_first_token", result.first_texts, 50, 95),
        **report.percentiles_ms("b_sent_late", result.delays, 95),
        "a_requests_per_second": len(flood.answers) / flood.wall_seconds if flood else None,
        "a_tokens_per_second": flood.tokens / flood.wall_seconds if flood else None,
        **report.percentiles_ms("a_inter_token_latency", flood.gaps if flood else [], 50),
    }

"""`bench fair`: one key floods a small server; what another key feels of it, with the fair queue and without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from bench.chat import chat_job, tokens_of
from bench.figures import Figures, Row, in_turns, percentiles_ms, row_of, say
from bench.hearth import HearthServer, Workspace, create_key, load_generator, open_workspace, running
from bench.load import Answer, LoadResult
from bench.processes import Child
from bench.report import JsonFile, MaxTokens, Model, Models, Repeats, Report, WeightsDir, conditions, ending_cleanly

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


class Keys:
    """A server with a key for A and one for B, and what sends for both."""

    def __init__(self, place: Workspace, server: HearthServer, second_key: str, load: Child) -> None:
        self._place = place
        self._server = server
        self._second_key = second_key
        self._load = load

    async def measure(self, settings: Settings, repeat: int, *, flooded: bool, asked: bool) -> Figures:
        """Do one run of either key or both. Raises `BenchError`."""
        label = f"{repeat}{flooded}{asked}"
        flood = chat_job(
            *(self._server, self._place.model, settings.max_tokens), label=f"{label}a", streams=settings.flood
        )
        at = moments(settings.seconds, settings.every_seconds, repeat) if asked else []
        job = chat_job(
            *(self._server, self._place.model, settings.max_tokens),
            label=f"{label}b",
            moments=at,
            seconds=settings.seconds,
            beside=flood if flooded else None,
            lead_seconds=_LEAD_SECONDS,
        )
        result = await self._load.run(msgspec.structs.replace(job, key=self._second_key), LoadResult)
        await asyncio.sleep(_REST_SECONDS)
        return fair_figures(result)


def fair(  # noqa: PLR0913  # one argument per option
    *,
    model: Model = "service-plus",
    models: Models = Path("models.yaml"),
    weights_dir: WeightsDir = None,
    places: Annotated[int, typer.Option(min=2, help="Requests generated at the same time (max_num_seqs).")] = 4,
    flood: Annotated[int, typer.Option(min=1, max=_QUEUE, help="Requests that A keeps in flight.")] = 200,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two requests of B.")] = 1.0,
    repeats: Repeats = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long B sends in one run.")] = 20.0,
    max_tokens: MaxTokens = 64,
    json: JsonFile = None,
) -> None:
    """Measure what one key's flood does to another key, with the fair queue and first come, first served."""
    settings = Settings(places, flood, every, repeats, seconds, max_tokens)
    small = {"max_num_seqs": places, "max_queued_requests": _QUEUE}
    unfair = small | {"fair_queue": False, "kept_for_newcomers": 0}
    with ending_cleanly(), ExitStack() as stack:
        one, other = [
            stack.enter_context(open_workspace(models, model, weights_dir, engine=engine))
            for engine in (small | {"fair_queue": True}, unfair)
        ]
        asyncio.run(_benchmark(settings, one, other)).deliver(json)


async def _benchmark(settings: Settings, one: Workspace, other: Workspace) -> Report:
    report = Report("fair", asdict(settings), conditions(one))
    say("Starting two servers, one with the fair queue and one without.")
    async with (
        running(HearthServer.launch(one), HearthServer.launch(other)) as servers,
        _keys(one, servers[0]) as fairly,
        _keys(other, servers[1]) as first_come,
    ):
        # In this order (and back), those that are compared with each other are neighbours.
        targets = {
            B_ALONE: partial(fairly.measure, settings, flooded=False, asked=True),
            FAIR: partial(fairly.measure, settings, flooded=True, asked=True),
            A_ALONE: partial(fairly.measure, settings, flooded=True, asked=False),
            A_ALONE_FIRST_COME: partial(first_come.measure, settings, flooded=True, asked=False),
            FIRST_COME: partial(first_come.measure, settings, flooded=True, asked=True),
        }
        for keys in (fairly, first_come):  # warms up
            await keys.measure(replace(settings, seconds=_LEAD_SECONDS), -1, flooded=True, asked=True)
        say("Measuring:")
        row = await in_turns("flood", targets, repeats=settings.repeats, headline="b_latency_p95_ms")
    report.tables = [
        ("What B feels", [_pair(row, FAIR, B_ALONE), _pair(row, FIRST_COME, B_ALONE)]),
        ("What A gets", [_pair(row, FAIR, A_ALONE), _pair(row, A_ALONE, A_ALONE_FIRST_COME)]),
    ]
    return report


@asynccontextmanager
async def _keys(place: Workspace, server: HearthServer) -> AsyncIterator[Keys]:
    async with load_generator(place) as load:
        yield Keys(place, server, await create_key(place, "second"), load)


def _pair(row: Row, ours: str, theirs: str) -> Row:
    return row_of(f"{ours} / {theirs}", {name: row.runs[name] for name in (ours, theirs)})


def moments(seconds: float, every_seconds: float, seed: int) -> list[float]:
    """Return when B sends each request; `seed` decides how far each is from the beat."""
    source = random.Random(seed)  # noqa: S311  # repeatable on purpose
    count = max(1, round(seconds / every_seconds))
    return [(number + _JITTER * source.random()) * every_seconds for number in range(count)]


def fair_figures(result: LoadResult) -> Figures:
    """Put a run into figures; None for the key that sent nothing."""
    asked, flood = result.answers, result.beside
    gaps = [after - before for one in flood.answers for before, after in pairwise(one.text_times)] if flood else []
    return {
        "b_requests": len(asked) or None,
        **percentiles_ms("b_latency", [answer.seconds for answer in asked], 50, 95, 99),
        **percentiles_ms("b_time_to_first_token", [_first(answer) for answer in asked], 50, 95),
        **percentiles_ms("b_sent_late", [answer.started - answer.asked for answer in asked], 95),
        "a_requests_per_second": len(flood.answers) / flood.wall_seconds if flood else None,
        "a_tokens_per_second": tokens_of(flood) / flood.wall_seconds if flood else None,
        **percentiles_ms("a_inter_token_latency", gaps, 50),
    }


def _first(answer: Answer) -> float:
    return (answer.text_times[0] if answer.text_times else answer.finished) - answer.asked

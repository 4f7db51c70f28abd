"""`bench chat`: chat completions of the server against its bare engine, streamed and plain, at several loads."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.chat_job import ChatJob
from benchmarks.chat_targets import BareTarget, ServerTarget
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Case, Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.report import document, print_table
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_SPEED = {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "time_to_first_token_p50_ms": "first token p50 ms",
    "time_to_first_token_p99_ms": "first token p99 ms",
    "inter_token_latency_p50_ms": "between tokens p50 ms",
    "inter_token_latency_p99_ms": "between tokens p99 ms",
    "latency_p50_ms": "answer p50 ms",
    "latency_p99_ms": "answer p99 ms",
}
_COST = {
    "api_cpu_ms_per_request": "API CPU ms/request",
    "api_cpu_ms_per_1000_tokens": "API CPU ms/1000 tokens",
    "engine_cpu_ms_per_request": "engine CPU ms/request",
    "load_cpu_ms_per_request": "load CPU ms/request",
    "api_peak_rss_mib": "API peak MiB",
    "engine_peak_rss_mib": "engine peak MiB",
}
_FEWEST_REQUESTS = 8
_FEWEST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `seconds` is how long one run should about take."""

    model: str
    streams: tuple[int, ...]
    repeats: int
    seconds: float
    max_tokens: int
    method: str = "closed loop, targets in turns, medians of the repeats"


def chat(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    streams: Annotated[str, typer.Option(help="How many requests run at the same time, one row each.")] = "1,8,32,128",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row and target; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long one run takes.")] = 2.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer, exactly.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="One short run at 1 and 32 streams: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Compare the server with its bare engine: requests/s, tokens/s, latencies, CPU and memory."""
    plan = Plan(model, _numbers(streams), repeats, seconds, max_tokens)
    if quick:
        plan = Plan(model, (1, 32), 1, 1.0, max_tokens)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        report, rows = asyncio.run(_benchmark(plan, place))
    if deliver(report, output, as_json=as_json):
        print_table("How fast", rows, _SPEED)
        print_table("What it costs", rows, _COST)


async def _benchmark(plan: Plan, place: Workplace) -> tuple[bytes, list[Row]]:
    under = conditions(place)
    async with _started(place) as (server, bare):
        say("Finding out how many requests fill a run:")
        cases = []
        for streamed in (True, False):
            for streams in plan.streams:
                requests = await _requests(plan, streams, server, bare, streamed=streamed)
                cases.append(_case(plan, streams, requests, streamed=streamed))
        say(f"Measuring, about {2 * plan.repeats * len(cases) * plan.seconds:.0f} s:")
        rows = await compare([server, bare], cases, repeats=plan.repeats, headline="requests_per_second")
    return document("chat", under, asdict(plan), rows), rows


@asynccontextmanager
async def _started(place: Workplace) -> AsyncIterator[tuple[ServerTarget, BareTarget]]:
    """Start both at the same time: they mostly wait for their imports."""
    say("Starting the server and the bare engine; each loads the model.")
    began = time.monotonic()
    starts = (asyncio.create_task(ServerTarget.start(place)), asyncio.create_task(BareTarget.start(place)))
    try:
        server, bare = await asyncio.gather(*starts)
        say(f"Both are ready after {time.monotonic() - began:.0f} s.")
        yield server, bare
    finally:
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(target.stop() for target in outcomes if not isinstance(target, BaseException)))


async def _requests(plan: Plan, streams: int, server: ServerTarget, bare: BareTarget, *, streamed: bool) -> int:
    """Warm both up for a case and return how many requests the slower server needs to fill a run.

    Whole rounds, because the requests of a round begin and end together: a part of one would run half empty.
    """
    job = ChatJob(plan.model, streams, max(streams, _FEWEST_REQUESTS), streamed, plan.max_tokens, f"warm-{streams}")
    await bare.measure(job)
    rate = (await server.measure(job))["requests_per_second"] or 0.0
    rounds = max(_FEWEST_ROUNDS, _FEWEST_REQUESTS // streams, round(rate * plan.seconds / streams))
    say(f"  {_name(streams, streamed=streamed)}: {rounds * streams} requests a run")
    return rounds * streams


def _case(plan: Plan, streams: int, requests: int, *, streamed: bool) -> Case[ChatJob]:
    def job(repeat: int) -> ChatJob:
        label = f"{repeat}-{streams}-{'s' if streamed else 'p'}"
        return ChatJob(plan.model, streams, requests, streamed, plan.max_tokens, label)

    return Case(_name(streams, streamed=streamed), job)


def _name(streams: int, *, streamed: bool) -> str:
    return f"{'streamed' if streamed else 'plain'}, {streams}"


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,8,32", param_hint="--streams")
    return numbers

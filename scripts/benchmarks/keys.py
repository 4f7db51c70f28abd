"""`bench keys`: what keys cost a request, whether refusals betray which key ids exist, and what limits cost."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, row_of, say
from benchmarks.conditions import conditions
from benchmarks.hearth import HearthServer
from benchmarks.keys_aims import Found, verdicts
from benchmarks.keys_auth import (
    NO_STEP,
    OPEN,
    STEP,
    UNKNOWN,
    WITH_KEY,
    WRONG,
    call_figures,
    refusal_times,
    step_in_process,
    step_over_http,
)
from benchmarks.keys_limits import LIMITED, UNLIMITED, Pace, databases, limiter_in_process, limits_over_http
from benchmarks.keys_made import make_keys
from benchmarks.rank_test import Area, area
from benchmarks.report import document, print_table, print_verdicts
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.figures import Figures
    from benchmarks.keys_made import MadeKeys

_TIMES = {"p50_ms": "p50 ms", "p95_ms": "p95 ms", "p99_ms": "p99 ms", "calls": "calls"}
_CPU = {
    "cpu_percent_of_one_core": "CPU, % of one core",
    "cpu_ms_per_request": "CPU ms/request",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "requests_per_second": "requests/s",
    "not_taken": "not taken",
}
_START_SECONDS = 900.0  # a large model is read from a slow disk


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `samples` are refusals in one repeat, `requests` calls of each kind of the other part."""

    keys: int
    per_second: float
    repeats: int
    seconds: float
    samples: int
    requests: int
    method: str = "single calls in an order of chance; paced runs in turns; medians of the repeats"

    @property
    def pace(self) -> Pace:
        """How the limits are used."""
        return Pace(self.per_second, self.seconds, self.keys)


def keys(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml; it is loaded and not used.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    keys: Annotated[int, typer.Option(min=1, max=2000, help="Keys with limits, and as many without.")] = 200,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second where limits are measured.")] = 100.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of everything; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long one run with or without limits takes.")] = 10.0,
    samples: Annotated[int, typer.Option(min=100, help="Refusals that are timed in one repeat.")] = 10_000,
    quick: Annotated[bool, typer.Option("--quick", help="One short run of everything: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Measure what keys and their limits cost, and whether refusals tell which key ids exist."""
    plan = Plan(keys, rate, repeats, seconds, samples, requests=4000)
    if quick:
        plan = Plan(keys, rate, 1, 3.0, 1000, requests=500)
    with ending_cleanly(), open_workplace(models, model, None) as place:
        found, under = asyncio.run(_benchmark(plan, place))
    aims = verdicts(found)
    report = document("keys", under, asdict(plan), found.rows, aims)
    if not deliver(report, output, as_json=as_json):
        return
    print_table("What the authentication step costs", [found.row("step alone"), found.row("HTTP")], _TIMES)
    print_table("How long a refusal takes", [found.row("refusals")], _TIMES)
    print_table("What limits cost", [row for row in found.rows if "cpu_ms_per_request" in row.ratio], _CPU)
    print_verdicts(aims)


async def _benchmark(plan: Plan, place: Workplace) -> tuple[Found, dict[str, Any]]:
    under = conditions(place)
    say(f"Making {2 * plan.keys} keys, and starting a server; it loads the model.")
    began = time.monotonic()
    made = await make_keys(place, plan.keys)
    with databases(place) as urls:
        async with _server(place) as server:
            say(
                f"It is ready after {time.monotonic() - began:.0f} s. Measuring, at least {_seconds(plan, urls):.0f} s:"
            )
            return await _measured(plan, place, server, made, urls), under


@asynccontextmanager
async def _server(place: Workplace) -> AsyncIterator[HearthServer]:
    command = (sys.executable, "-m", "benchmarks.keys_server")
    server = await HearthServer.start(place, within_seconds=_START_SECONDS, command=command)
    try:
        yield server
    finally:
        await server.stop()


async def _measured(plan: Plan, place: Workplace, server: HearthServer, made: MadeKeys, urls: dict[str, str]) -> Found:
    key = made.unlimited[0]
    runs: dict[str, list[dict[str, Figures]]] = {}
    areas: list[tuple[Area, Area]] = []
    for repeat in range(plan.repeats):
        new = {
            "step alone": await step_in_process(place, key, plan.requests),
            "HTTP": await step_over_http(server, key, plan.requests),
        }
        times = await refusal_times(server, made.unlimited, plan.samples)
        areas.append((area(times[WRONG], times[UNKNOWN]), area(times[UNKNOWN][::2], times[UNKNOWN][1::2])))
        new["refusals"] = {name: call_figures(seconds) for name, seconds in times.items()}
        for name, url in urls.items():
            new[f"limiter alone, {name}"] = await limiter_in_process(place, url, plan.pace)
        new["limits, HTTP"] = await limits_over_http(server, made, plan.pace, first=repeat % 2 == 0)
        for case, figures in new.items():
            runs.setdefault(case, []).append(figures)
        say(f"  repeat {repeat + 1} of {plan.repeats}: refusals {areas[-1][0].value:.4f} area")
    pairs = {"step alone": (STEP, NO_STEP), "HTTP": (WITH_KEY, OPEN), "refusals": (WRONG, UNKNOWN)}
    rows = [_row(case, of_case, *pairs.get(case, (LIMITED, UNLIMITED))) for case, of_case in runs.items()]
    return Found(rows, [one for one, _ in areas], [control for _, control in areas])


def _row(case: str, runs: list[dict[str, Figures]], ours: str, theirs: str) -> Row:
    """Put the repeats of a case into a row; the two named targets make its ratio."""
    by_target = {name: [run[name] for run in runs] for name in runs[0]}
    return row_of(case, by_target, ours, theirs)


def _seconds(plan: Plan, urls: dict[str, str]) -> float:
    return plan.repeats * 2 * (plan.seconds * (len(urls) + 1) + plan.keys / plan.per_second)

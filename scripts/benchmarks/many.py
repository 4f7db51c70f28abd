"""`bench many`: a burst far over what the server holds. Each request is answered or refused, and nothing is left."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, row_of, say
from benchmarks.conditions import conditions
from benchmarks.report import document, print_table, print_verdicts
from benchmarks.rough_job import RoughJob, RoughMeasurement, rough_figures
from benchmarks.rough_server import ANSWERS, LEVELS, asked, rested
from benchmarks.verdicts import Verdict
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import Figures

_REFUSED_SECONDS = 1.0
_GROWTH = 1.05
_WARM_STREAMS = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    model: str
    requests: int
    max_tokens: int
    repeats: int
    method: str = "one burst after the other; levels read once memory and open files rest"


def many(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A chat model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Streamed requests at the same moment.")] = 2000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer, exactly.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Bursts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Send thousands of requests at once: each is answered or refused with Retry-After, and nothing is left behind."""
    plan = Plan(model, requests, max_tokens, repeats)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        report, row, aims = asyncio.run(_many(plan, place))
    if deliver(report, output, as_json=as_json):
        print_table(f"{requests} requests at once", [row], ANSWERS)
        print_table("What the server holds", [row], LEVELS)
        print_verdicts(aims)


async def _many(plan: Plan, place: Workplace) -> tuple[bytes, Row, list[Verdict]]:
    under = conditions(place)
    async with asked(place) as (server, sender):
        await sender.run(RoughJob(plan.model, _WARM_STREAMS, plan.max_tokens, "warm"), RoughMeasurement)
        start, bursts = await rested(server.pid), list[dict[str, float | None]]()
        for number in range(plan.repeats):
            job = RoughJob(plan.model, plan.requests, plan.max_tokens, f"many-{number}")
            seen = await sender.run(job, RoughMeasurement)
            say("\n".join([f"  burst {number + 1}: {len(seen.answered_seconds)} answered", *seen.what_was_wrong]))
            bursts.append(rough_figures(seen) | (await rested(server.pid)).figures())
    row = row_of("burst", {"start": [start.figures()] * plan.repeats, "after": bursts})
    row.ratios = {}
    aims = many_verdicts(start.figures(), bursts)
    return document("many", under, asdict(plan), [row], aims), row, aims


def many_verdicts(start: Figures, bursts: Sequence[Figures]) -> list[Verdict]:
    """Judge the worst of the bursts."""

    def worst(name: str) -> float | None:
        return max((value for burst in bursts if (value := burst[name]) is not None), default=None)

    def grown(name: str) -> float | None:
        return _divided(worst(name), start[name])

    def last(name: str) -> float | None:
        return _divided(bursts[-1][name], bursts[0][name])

    most_in_all = max(map(_in_all, bursts))
    return [
        Verdict.at_most("requests neither answered nor refused with Retry-After", worst("wrong"), 0),
        Verdict.at_most("refused p99, ms", worst("refused_p99_ms"), _REFUSED_SECONDS * 1000),
        Verdict.at_most("memory in all, after to before", _divided(most_in_all, _in_all(start)), _GROWTH),
        Verdict.at_most("API memory after to before", grown("api_rss_mib"), _GROWTH),
        Verdict.at_most("engine memory after to before", grown("engine_rss_mib"), _GROWTH),
        Verdict.at_most("API memory after the last burst to after the first", last("api_rss_mib"), None),
        Verdict.at_most("API files after to before", grown("api_files"), _GROWTH),
        Verdict.at_most("engine files after to before", grown("engine_files"), _GROWTH),
    ]


def _in_all(figures: Figures) -> float:
    return sum(figures[name] or 0.0 for name in ("api_rss_mib", "engine_rss_mib"))


def _divided(after: float | None, before: float | None) -> float | None:
    return None if not before or after is None else after / before

"""`bench cost`: what a request and a token cost the server's process: processor time, function calls, writes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.cost_cases import loads, singles
from benchmarks.cost_targets import NOW, cost_targets
from benchmarks.errors import BenchError
from benchmarks.figures import ratios
from benchmarks.report import document, print_table
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

_BEFORE = "before"
_TIME = {
    "api_cpu_ms_per_request": "API CPU ms/request",
    "api_cpu_ms_per_1000_tokens": "API CPU ms/1000 tokens",
    "requests_per_second": "requests/s",
    "tokens_per_event": "tokens/event",
}
_COUNTS = {
    "python_calls": "Python calls",
    "native_calls": "native calls",
    "write_calls": "write calls",
    "tokens_per_event": "tokens/event",
}
_SAME = ("cpu_model", "cores", "python", "versions", "model")


class Earlier(msgspec.Struct):
    """What is read of the report of an earlier run."""

    benchmark: str
    conditions: dict[str, Any]
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    model: str
    repeats: int
    against: str | None
    method: str = "processor time under load, then counts of requests one at a time; medians of the repeats"


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of both tables."""

    times: list[Row]
    counts: list[Row]


def cost(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A chat model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row; medians are shown.")] = 3,
    against: Annotated[Path | None, typer.Option(help="The JSON document of an earlier run, to compare with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Measure what a request and a token cost the server's process, and count its calls, which no machine changes."""
    plan = Plan(model, repeats, None if against is None else str(against))
    with ending_cleanly(), open_workplace(models, model, None) as place:
        earlier = None if against is None else read_earlier(against)
        under = conditions(place)
        found = asyncio.run(_measured(plan, place))
        if earlier is not None:
            say("\n".join(unlike(under, earlier.conditions)) or "The earlier run had the same conditions.")
            found = Found(*([beside(row, earlier.rows) for row in rows] for rows in (found.times, found.counts)))
    report = document("cost", under, asdict(plan), found.times + found.counts)
    if deliver(report, output, as_json=as_json):
        print_table("Processor time of the server's process", found.times, _TIME)
        print_table("What it does, one request at a time", found.counts, _COUNTS)


async def _measured(plan: Plan, place: Workplace) -> Found:
    say("Starting the server; it loads the model.")
    async with cost_targets(place) as (processor, counter):
        say("Measuring:")
        under_load, alone = loads(plan.model), singles(plan.model)
        for case in under_load[:3]:  # what is done once only, by the first of all requests
            await processor.measure(case.job(-1))
        return Found(
            await compare([processor], under_load, repeats=plan.repeats, headline="requests_per_second"),
            await compare([counter], alone, repeats=plan.repeats, headline="python_calls"),
        )


def read_earlier(file: Path) -> Earlier:
    """Read what an earlier run wrote with --output. Raises `BenchError`."""
    try:
        earlier = msgspec.json.decode(file.read_bytes(), type=Earlier)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{file} is no report of an earlier run: {error}. Make one with --output FILE.") from error
    if earlier.benchmark != "cost":
        raise BenchError(f"{file} is a report of `bench {earlier.benchmark}`, not of `bench cost`.")
    return earlier


def unlike(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Say what was not the same at an earlier run."""
    return [
        f"The earlier run had another {name.replace('_', ' ')}: {before.get(name)}, now {now.get(name)}."
        for name in _SAME
        if before.get(name) != now.get(name)
    ]


def beside(row: Row, earlier: Sequence[Row]) -> Row:
    """Return a row with what an earlier run found for it, if it has it, and the ratios of the two medians."""
    for other in earlier:
        if other.case == row.case and NOW in other.medians:
            now, before = row.medians[NOW], other.medians[NOW]
            both = {NOW: row.runs[NOW], _BEFORE: other.runs[NOW]}
            return Row(row.case, both, {NOW: now, _BEFORE: before}, {_BEFORE: ratios(now, before)})
    return row

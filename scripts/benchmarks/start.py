"""`bench start` and `bench killed`: how soon a server answers, and how soon again after its engine was killed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.chat import chosen
from benchmarks.chat_targets import RUST, SERVE
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Case, Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.report import document, print_table
from benchmarks.rust_frontend import rust_frontend
from benchmarks.start_targets import HearthStart, KilledEngine, StartJob, VllmStart
from benchmarks.workplace import Workplace, open_workplace, served_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare import Target

_START = {
    "live_seconds": "live s",
    "answered_seconds": "chat answered s",
    "ready_seconds": "all ready s",
    "cpu_seconds": "CPU s",
    "pss_mib": "PSS MiB",
}
_KILLED = {"refused_ms": "first refusal ms", "answered_seconds": "answered again s"}


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What is measured."""

    model: str
    against: tuple[str, ...]
    repeats: int
    method: str = "started, asked and ended in turns; medians; ratios are medians of the ratios within each repeat"


@dataclass(frozen=True, slots=True)
class KillPlan:
    """What is measured."""

    model: str
    kills: int
    method: str = (
        "kill -9 of the engine's process while it rests, then one request after the other until one is answered"
    )


def start(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="The chat model that is asked.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml whose models are all served.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demos.")] = None,
    against: Annotated[str, typer.Option(help="What to compare with: serve, rust, both or none.")] = SERVE,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Measure start-up: alive, answering, all models ready; Hearth with all models, with one, and vllm serve."""
    plan = StartPlan(model, () if against == "none" else chosen(against, (SERVE, RUST), "--against"), repeats)
    with ending_cleanly(), ExitStack() as stack:
        others = [name for name in served_names(models) if name != model]
        everything = stack.enter_context(open_workplace(models, model, weights_dir, beside=others))
        alone = stack.enter_context(open_workplace(models, model, weights_dir))
        report, row = asyncio.run(_start(plan, everything, alone))
    if deliver(report, output, as_json=as_json):
        ready = {name: name.replace("_", " ").removesuffix("seconds") + "s" for name in _model_figures(row)}
        print_table("Start", [row], _START | ready)


def killed(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A chat model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="How often its engine is killed.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Measure the seconds from kill -9 of an engine to the next answer."""
    plan = KillPlan(model, kills)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        report, row = asyncio.run(_killed(plan, place))
    if deliver(report, output, as_json=as_json):
        print_table("After kill -9 of the engine", [row], _KILLED)


async def _start(plan: StartPlan, everything: Workplace, alone: Workplace) -> tuple[bytes, Row]:
    under = conditions(everything)
    rust = await rust_frontend() if RUST in plan.against else None
    targets: list[Target[StartJob]] = [
        await HearthStart.prepare("hearth, all models", everything),
        await HearthStart.prepare("hearth, one model", alone),
        *(VllmStart(name, alone, rust if name == RUST else None) for name in plan.against),
    ]
    say(f"Starting {', '.join(target.name for target in targets)} in turns, {plan.repeats} times:")
    (row,) = await compare(targets, _once(plan.model), repeats=plan.repeats, headline="answered_seconds")
    return document("start", under, asdict(plan), [row]), row


async def _killed(plan: KillPlan, place: Workplace) -> tuple[bytes, Row]:
    under = conditions(place)
    say("Starting the server; it loads the model.")
    target = await KilledEngine.start(place)
    try:
        (row,) = await compare([target], _once(plan.model), repeats=plan.kills, headline="answered_seconds")
    finally:
        await target.stop()
    return document("killed", under, asdict(plan), [row]), row


def _once(model: str) -> Sequence[Case[StartJob]]:
    return [Case("start", lambda repeat: StartJob(model, repeat))]


def _model_figures(row: Row) -> list[str]:
    return [name for name in next(iter(row.medians.values())) if name.startswith("ready_") and name not in _START]

"""`bench soak`: a busy server, clients of whom some hang up, and whether its memory grows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.chat_plot import check_plots, pyplot
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, row_of, say
from benchmarks.conditions import conditions
from benchmarks.levels import Level, Slope, slope
from benchmarks.report import document, print_table, print_verdicts
from benchmarks.rough_job import RoughJob, RoughMeasurement, rough_figures
from benchmarks.rough_server import ANSWERS, LEVELS, asked
from benchmarks.verdicts import Verdict
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.figures import Figures

_SLICE_SECONDS = 60.0
_SAMPLE_SECONDS = 2.0
_SETTLING_PART = 0.25  # of a soak: pools fill and caches grow to their limits
_PER_HOUR = 1.0  # MiB, or files


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `leaving` is the part of the clients that hang up."""

    model: str
    minutes: float
    streams: int
    leaving: float
    max_tokens: int
    method: str = (
        "closed loop, streamed and plain in turn, prompts and answers of varying length; "
        "slopes by least squares on block means, first quarter left out"
    )


def soak(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A chat model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    leaving: Annotated[float, typer.Option(min=0, max=1, help="Part of the clients that hang up.")] = 0.2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, on average.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory over time into this PNG file.")] = None,
) -> None:
    """Keep a server busy with clients of whom some hang up, and see whether its memory grows."""
    plan = Plan(model, minutes, streams, leaving, max_tokens)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        if plot is not None:
            check_plots()
        report, row, aims = asyncio.run(_soak(plan, place))
    if plot is not None:
        save_levels(row.runs["levels"], plot)
    if deliver(report, output, as_json=as_json):
        print_table("What became of the requests of a minute", [row], ANSWERS)
        print_table("What the server holds", [row], LEVELS)
        print_verdicts(aims)


async def _soak(plan: Plan, place: Workplace) -> tuple[bytes, Row, list[Verdict]]:
    under, slices = conditions(place), list[dict[str, float | None]]()
    levels: list[dict[str, float | None]] = []
    async with asked(place) as (server, sender):
        began = time.monotonic()
        sampling = asyncio.create_task(_sample(server.pid, levels))
        try:
            while (left := plan.minutes * 60 - (time.monotonic() - began)) > 0:
                number = len(slices)
                job = RoughJob(
                    *(plan.model, plan.streams, plan.max_tokens, f"soak-{number}"),
                    seconds=min(left, _SLICE_SECONDS),
                    leaving=plan.leaving,
                    seed=number,
                )
                seen = await sender.run(job, RoughMeasurement)
                slices.append(rough_figures(seen))
                api = levels[-1]["api_rss_mib"] or 0.0
                say("\n".join([f"  minute {number + 1}: API {api:.1f} MiB, {seen.wrong} wrong", *seen.what_was_wrong]))
                if sampling.done():
                    sampling.result()
        finally:
            sampling.cancel()
    row = row_of("minute", {"requests": slices, "levels": levels}, "requests")
    aims = soak_verdicts(slices, levels)
    return document("soak", under, asdict(plan), [row], aims), row, aims


def soak_verdicts(slices: Sequence[Figures], levels: Sequence[Figures]) -> list[Verdict]:
    """Judge how memory and files grew, and what was wrong."""
    aims = [Verdict.at_most("requests that failed", sum(one["wrong"] or 0 for one in slices), 0)]
    for name, what in LEVELS.items():
        found = _growth(levels, name)
        if found is None:
            aims.append(Verdict.at_most(f"{what} more per hour", None, _PER_HOUR))
            continue
        aims.append(Verdict.at_most(f"{what} more per hour (+- {found.plus_minus:.2g})", found.per_hour, None))
        aims.append(Verdict.at_most(f"{what} more per hour, at the least (95 %)", found.low, _PER_HOUR))
    return aims


def _growth(levels: Sequence[Figures], name: str) -> Slope | None:
    late = levels[int(len(levels) * _SETTLING_PART) :]
    return slope([level["seconds"] or 0.0 for level in late], [level[name] or 0.0 for level in late])


def save_levels(levels: Sequence[Figures], file: Path) -> None:
    """Draw memory over time and write a PNG, making its folder."""
    plot = pyplot()
    figure, panels = plot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    minutes = [(level["seconds"] or 0.0) / 60 for level in levels]
    for panel, name in zip(panels, ("api_rss_mib", "engine_rss_mib"), strict=True):
        panel.plot(minutes, [level[name] for level in levels])
        panel.set(ylabel=LEVELS[name])
        panel.grid(visible=True, alpha=0.25)
        if (found := _growth(levels, name)) is not None:
            panel.set(title=f"{found.per_hour:+.2f} MiB an hour (+- {found.plus_minus:.2f})")
    panels[-1].set(xlabel="minutes")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plot.close(figure)


async def _sample(pid: int, levels: list[dict[str, float | None]]) -> None:
    began = time.monotonic()
    while True:
        levels.append((await asyncio.to_thread(Level.of, pid)).figures() | {"seconds": time.monotonic() - began})
        await asyncio.sleep(_SAMPLE_SECONDS)

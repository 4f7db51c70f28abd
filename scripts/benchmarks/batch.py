"""`bench batch`: a batch against the same requests one by one, and interactive requests beside batches."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.batch_job import BatchJob, BatchJobs, InteractiveJob
from benchmarks.batch_targets import BatchTarget, BusyTarget, IdleTarget, SingleTarget, started
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Case, Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.report import document, print_table
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from benchmarks.batch_targets import Bench

_ITEMS = {
    "wall_seconds": "wall s",
    "items_per_second": "items/s",
    "tokens_per_second": "tokens/s",
    "api_cpu_ms_per_item": "API CPU ms/item",
    "engine_cpu_ms_per_item": "engine CPU ms/item",
    "load_cpu_ms_per_item": "load CPU ms/item",
    "api_peak_rss_mib": "API peak MiB",
    "engine_peak_rss_mib": "engine peak MiB",
}
_INTERACTIVE = {
    "requests": "requests",
    "time_to_first_token_p50_ms": "first token p50 ms",
    "time_to_first_token_p99_ms": "first token p99 ms",
    "latency_p50_ms": "answer p50 ms",
    "latency_p99_ms": "answer p99 ms",
    "sent_late_p99_ms": "sent late p99 ms",
    "batches": "batches",
    "items_per_second": "batch items/s",
}
_EVERY_SECONDS = 0.1
_INTERACTIVE_TOKENS = 16
_QUICK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `bad` is a part of `items`, `seconds` one run of interactive requests."""

    model: str
    items: int
    bad: float
    repeats: int
    seconds: float
    max_tokens: int
    every_seconds: float = _EVERY_SECONDS
    interactive_tokens: int = _INTERACTIVE_TOKENS
    method: str = "batches: all at once; interactive: open loop; targets in turns, medians of the repeats"

    def jobs(self, label: str, seed: int = 0) -> BatchJobs:
        """Return the work of one run; `label` must be new, or the prompts are cached."""
        return BatchJobs(
            BatchJob(self.model, self.items, self.bad, self.max_tokens, label),
            InteractiveJob(self.model, self.seconds, self.every_seconds, self.interactive_tokens, label, seed),
        )


def batch(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    items: Annotated[int, typer.Option(min=1, max=256, help="Items of a batch.")] = 256,
    bad: Annotated[float, typer.Option(min=0, max=0.9, help="Which part of them must be refused.")] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each target; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long interactive requests are sent in a run.")] = 20.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an item's answer at most, on average.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="One short run of everything: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Compare a batch with single requests, and interactive requests beside batches with those on an idle server."""
    plan = Plan(model, items, bad, repeats, seconds, max_tokens)
    if quick:
        plan = Plan(model, items, bad, 1, _QUICK_SECONDS, max_tokens)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        report, whole, interactive = asyncio.run(_benchmark(plan, place))
    if deliver(report, output, as_json=as_json):
        print_table("A batch and single requests", whole, _ITEMS)
        print_table("Interactive requests beside batches", interactive, _INTERACTIVE)


async def _benchmark(plan: Plan, place: Workplace) -> tuple[bytes, list[Row], list[Row]]:
    under = conditions(place)
    say("Starting the server; it loads the model.")
    began = time.monotonic()
    async with started(place) as bench:
        say(f"It is ready after {time.monotonic() - began:.0f} s. Warming up.")
        whole, interactive = await _measured(plan, bench)
    return document("batch", under, asdict(plan), whole + interactive), whole, interactive


async def _measured(plan: Plan, bench: Bench) -> tuple[list[Row], list[Row]]:
    pair = (BatchTarget(bench), SingleTarget(bench))
    for target in pair:
        await target.measure(plan.jobs("warm"))
    say("Measuring a batch against single requests:")
    bad = round(plan.items * plan.bad)
    cases = [Case(f"{plan.items} items, {bad} bad", lambda repeat: plan.jobs(f"a{repeat}"))]
    whole = await compare(pair, cases, repeats=plan.repeats, headline="wall_seconds")
    say(f"Measuring interactive requests, about {2 * plan.repeats * plan.seconds:.0f} s:")
    cases = [Case("interactive", lambda repeat: plan.jobs(f"b{repeat}", seed=repeat))]
    headline = "time_to_first_token_p99_ms"
    return whole, await compare((BusyTarget(bench), IdleTarget(bench)), cases, repeats=plan.repeats, headline=headline)

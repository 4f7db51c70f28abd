"""`bench fair`: one key floods a small server; what another key feels of it, with the fair queue and without."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Case, Row, compare, paired, say
from benchmarks.conditions import conditions
from benchmarks.fair_job import A_ALONE, A_ALONE_FIRST_COME, B_ALONE, FAIR, FIRST_COME, FairJob, verdicts
from benchmarks.fair_targets import started
from benchmarks.report import document, print_table, print_verdicts
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from benchmarks.verdicts import Verdict

_B = {
    "b_requests": "B's requests",
    "b_latency_p50_ms": "B's answer p50 ms",
    "b_latency_p95_ms": "B's answer p95 ms",
    "b_latency_p99_ms": "B's answer p99 ms",
    "b_time_to_first_token_p50_ms": "B's first token p50 ms",
    "b_time_to_first_token_p95_ms": "B's first token p95 ms",
    "b_sent_late_p95_ms": "sent late p95 ms",
}
_A = {
    "a_requests_per_second": "A's requests/s",
    "a_tokens_per_second": "A's tokens/s",
    "a_inter_token_latency_p50_ms": "A's step p50 ms",
}
_WAITING = 512
_QUICK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `seconds` is how long B sends in one run, `flood` how many requests A has in flight."""

    model: str
    places: int
    flood: int
    every_seconds: float
    repeats: int
    seconds: float
    max_tokens: int
    method: str = "A: closed loop; B: open loop; targets in turns, medians of the repeats"

    def job(self, label: str, seed: int = 0, seconds: float | None = None) -> FairJob:
        """Return the work of one run; `label` must be new, or the prompts are cached."""
        seconds = self.seconds if seconds is None else seconds
        return FairJob(self.model, seconds, self.flood, self.every_seconds, self.max_tokens, label, seed)


def fair(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    places: Annotated[int, typer.Option(min=2, help="Requests generated at the same time (max_num_seqs).")] = 4,
    flood: Annotated[int, typer.Option(min=1, max=_WAITING, help="Requests that A keeps in flight.")] = 200,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two requests of B.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each target; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long B sends in one run.")] = 20.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer, exactly.")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="One short run of everything: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Measure what one key's flood does to another key, with the fair queue and first come, first served."""
    plan = Plan(model, places, flood, every, 1 if quick else repeats, _QUICK_SECONDS if quick else seconds, max_tokens)
    small = {"max_num_seqs": places, "max_queued_requests": _WAITING}
    unfair = small | {"fair_queue": False, "kept_for_newcomers": 0}
    with ending_cleanly(), ExitStack() as stack:
        pair = [
            stack.enter_context(open_workplace(models, model, weights_dir, engine=engine))
            for engine in (small | {"fair_queue": True}, unfair)
        ]
        report, row, aims = asyncio.run(_benchmark(plan, *pair))
    if not deliver(report, output, as_json=as_json):
        return
    print_table("What B feels", [paired(row, FAIR, B_ALONE), paired(row, FIRST_COME, B_ALONE)], _B)
    print_table("What A gets", [paired(row, FAIR, A_ALONE), paired(row, A_ALONE, A_ALONE_FIRST_COME)], _A)
    print_verdicts(aims)


async def _benchmark(plan: Plan, one: Workplace, other: Workplace) -> tuple[bytes, Row, list[Verdict]]:
    under = conditions(one)
    say("Starting two servers, a fair one and one that is not; each loads the model.")
    began = time.monotonic()
    async with started(one, other) as targets:
        say(f"Both are ready after {time.monotonic() - began:.0f} s. Warming up.")
        for target in targets:
            await target.measure(plan.job("warm", seconds=2.0))
        say(f"Measuring, at least {len(targets) * plan.repeats * (plan.seconds + 4):.0f} s:")
        cases = [Case("flood", lambda repeat: plan.job(f"r{repeat}", seed=repeat))]
        (row,) = await compare(targets, cases, repeats=plan.repeats, headline="b_latency_p95_ms")
    aims = verdicts(row.runs)
    return document("fair", under, asdict(plan), [row], aims), row, aims

"""`bench chat`: chat completions of the server against its bare engine and vLLM's own servers, at several loads."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from benchmarks.chat_cases import Load, Shape, cases_for, loads
from benchmarks.chat_plot import check_plots, save_plot
from benchmarks.chat_targets import BARE, RUST, SERVE, started
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.report import document, print_table
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_N = TypeVar("_N", int, float)

SPEED = {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "time_to_first_token_p50_ms": "first token p50 ms",
    "time_to_first_token_p95_ms": "first token p95 ms",
    "time_to_first_token_p99_ms": "first token p99 ms",
}
TIMES = {
    "inter_token_latency_p50_ms": "between tokens p50 ms",
    "inter_token_latency_p95_ms": "between tokens p95 ms",
    "inter_token_latency_p99_ms": "between tokens p99 ms",
    "latency_p50_ms": "answer p50 ms",
    "latency_p95_ms": "answer p95 ms",
    "latency_p99_ms": "answer p99 ms",
}
CPU = {
    "api_cpu_ms_per_request": "API CPU ms/request",
    "api_cpu_ms_per_1000_tokens": "API CPU ms/1000 tokens",
    "engine_cpu_ms_per_request": "engine CPU ms/request",
    "engine_cpu_ms_per_1000_tokens": "engine CPU ms/1000 tokens",
    "load_cpu_ms_per_request": "load CPU ms/request",
    "load_cpu_ms_per_1000_tokens": "load CPU ms/1000 tokens",
}
MEMORY = {
    "api_peak_rss_mib": "API peak MiB",
    "engine_peak_rss_mib": "engine peak MiB",
    "api_pss_mib": "API PSS MiB",
    "engine_pss_mib": "engine PSS MiB",
}
_OTHERS = (BARE, SERVE, RUST)
_KINDS = ("streamed", "plain")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `seconds` is how long one run should about take, `rates` are requests/s of open loops."""

    model: str
    against: tuple[str, ...]
    streams: tuple[int, ...]
    rates: tuple[float, ...]
    kinds: tuple[str, ...]
    repeats: int
    seconds: float
    max_tokens: int
    plugin: bool
    method: str = "targets in turns, medians of the repeats, ratios are medians of the ratios within each repeat"

    @property
    def loads(self) -> list[Load]:
        """One per row."""
        return loads(self.streams, self.rates, self.kinds)


def chat(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    against: Annotated[str, typer.Option(help="What to compare with: bare, serve, rust, or several.")] = BARE,
    streams: Annotated[str, typer.Option(help="Requests at the same time, one row each, or none.")] = "1,8,32,128",
    rate: Annotated[str, typer.Option(help="Open loop: requests/s at random moments, one row each, or none.")] = "none",
    kinds: Annotated[str, typer.Option(help="streamed, plain or both.")] = "streamed,plain",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row and target; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long one run takes.")] = 2.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer, exactly.")] = 64,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Of all targets' models. Default: as models.yaml says.")
    ] = None,
    plugin: Annotated[
        bool, typer.Option("--plugin", help="Give vLLM's servers Hearth's engine plugin, as ours has it.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One short run at 1 and 32 streams: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load into this PNG file.")] = None,
) -> None:
    """Compare the server with its bare engine or vllm serve: requests/s, tokens/s, latencies, CPU and memory."""
    plan = Plan(
        model,
        chosen(against, _OTHERS, "--against"),
        (1, 32) if quick else numbers(streams, int, "--streams"),
        numbers(rate, float, "--rate"),
        chosen(kinds, _KINDS, "--kinds"),
        1 if quick else repeats,
        1.0 if quick else seconds,
        max_tokens,
        plugin,
    )
    if not plan.loads:
        raise typer.BadParameter("With neither --streams nor --rate there is nothing to measure.")
    engine = {} if compiled is None else {"enforce_eager": not compiled}
    with ending_cleanly(), open_workplace(models, model, weights_dir, engine=engine) as place:
        if plot is not None:
            check_plots()
        report, rows = asyncio.run(_benchmark(plan, replace(place, plugin=plan.plugin)))
        if plot is not None:
            save_plot(list(zip(plan.loads, rows, strict=True)), plot)
    if deliver(report, output, as_json=as_json):
        print_table("How fast", rows, SPEED | ({"sent_late_p95_ms": "sent late p95 ms"} if plan.rates else {}))
        print_table("How evenly, and how long in all", rows, TIMES)
        print_table("Processor time", rows, CPU)
        print_table("Memory", rows, MEMORY)


async def _benchmark(plan: Plan, place: Workplace) -> tuple[bytes, list[Row]]:
    under, left_out = conditions(place), dict[str, str]()
    async with started(place, plan.against, left_out) as targets:
        unequal = {target.name: said for target in targets if (said := target.unequal())}
        for name, said in unequal.items():
            say("\n".join([f"What differs with {name}:", *(f"  - {one}" for one in said)]))
        say("Finding out how many requests fill a run:")
        shape = Shape(plan.model, plan.max_tokens, plan.seconds)
        cases = await cases_for(shape, plan.loads, targets)
        say(f"Measuring, about {len(targets) * plan.repeats * len(cases) * plan.seconds:.0f} s:")
        rows = await compare(targets, cases, repeats=plan.repeats, headline="requests_per_second")
    settings = asdict(plan) | {"unequal": unequal, "left_out": left_out}
    return document("chat", under, settings, rows), rows


def numbers(text: str, kind: Callable[[str], _N], option: str) -> tuple[_N, ...]:
    """Read a list like 1,8,32, or none."""
    if text == "none":
        return ()
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,8,32", param_hint=option)
    return found


def chosen(text: str, words: Sequence[str], option: str) -> tuple[str, ...]:
    """Read a list of some of these words, in their order."""
    asked = {part.strip() for part in text.split(",")}
    if not asked <= {*words}:
        raise typer.BadParameter(f"{text!r} is no list of {', '.join(words)}", param_hint=option)
    return tuple(word for word in words if word in asked)

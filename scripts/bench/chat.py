"""`bench chat`: chat completions of Hearth's server beside vLLM's own servers, or another checkout of Hearth."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from bench import report
from bench.load import BenchError, LoadGenerator, LoadResult, VllmJob, load_generator, run_vllm
from bench.servers import HearthServer, Meter, Server, Target, Usage, Workspace, open_workspace, running, say
from bench.vllm_server import VllmServer, planned, rust_frontend

HEARTH, SERVE, RUST = "hearth", "serve", "rust"
_FEWEST_REQUESTS = 8
_FEWEST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. `seconds` is how long one run should about take."""

    against: tuple[str, ...]
    streams: tuple[int, ...]
    kinds: tuple[str, ...]
    load: Literal["vllm", "light"]
    repeats: int
    seconds: float
    prompt_tokens: int
    max_tokens: int
    method: str = "targets in turns, medians of the repeats, ratios are medians of the ratios within each repeat"


def chat(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml, or a folder of weights.")] = "service-plus",
    models: report.Models = Path("models.yaml"),
    weights_dir: report.WeightsDir = None,
    against: Annotated[
        str, typer.Option(help="What to compare with: serve, rust, the folder of another checkout, several, or none.")
    ] = SERVE,
    streams: Annotated[str, typer.Option(help="Requests at the same time, one row each.")] = "1,8,32,128",
    kinds: Annotated[str, typer.Option(help="streamed, plain or both.")] = "streamed,plain",
    load: Annotated[
        Literal["vllm", "light"] | None,
        typer.Option(help="What sends streamed requests: vllm bench serve, or our own (light), as for demo models."),
    ] = None,
    repeats: report.Repeats = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long one run takes.")] = 10.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt of vllm bench serve.")] = 64,
    max_tokens: report.MaxTokens = 64,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Of all targets' models. Default: as models.yaml says.")
    ] = None,
    json: report.JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load into this PNG file.")] = None,
) -> None:
    """Compare the server with vllm serve or another checkout: requests/s, tokens/s, latencies, CPU and memory."""
    loads = tuple(int(number) for number in report.numbers(streams, "--streams"))
    chosen = tuple(kind for kind in ("streamed", "plain") if kind in kinds.split(","))
    others = () if against == "none" else tuple(against.split(","))
    if not loads or not chosen or {HEARTH, ""} & {*others}:
        raise typer.BadParameter("--streams, --kinds or --against names nothing that can be measured.")
    engine = {} if compiled is None else {"enforce_eager": not compiled}
    if plot is not None:
        report.check_plots()
    with ExitStack() as stack:
        place = stack.enter_context(open_workspace(models, model, weights_dir, engine=engine))
        checkouts = {
            Path(name).resolve().name: stack.enter_context(
                open_workspace(models, model, weights_dir, engine=engine, checkout=Path(name).resolve())
            )
            for name in others
            if name not in {SERVE, RUST}
        }
        # A demo model is so fast that vllm bench serve would be measured with it.
        load = load or ("light" if planned(place)[2] else "vllm")
        settings = Settings(others, loads, chosen, load, repeats, seconds, prompt_tokens, max_tokens)
        whole, rows = asyncio.run(_benchmark(settings, place, checkouts))
        whole.deliver(json)
        if plot is not None:
            report.save_chat_plot(rows, plot)


async def _benchmark(
    settings: Settings, place: Workspace, checkouts: dict[str, Workspace]
) -> tuple[report.Report, list[report.Row]]:
    left_out: dict[str, str] = {}
    launches = _launches(settings, place, checkouts, left_out)
    whole = report.begin("chat", settings, place)
    say(f"Starting {', '.join(launches)}.")
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(running(place, *launches.values()))
        vllm = None
        if settings.load == "vllm" and "streamed" in settings.kinds:
            vllm = await stack.enter_async_context(load_generator(place.environment, place.log("vllm"), run_vllm))
        targets = dict(zip(launches, found, strict=True))
        unequal = {
            name: target.server.unequal() for name, target in targets.items() if isinstance(target.server, VllmServer)
        }
        for name, differences in unequal.items():
            say("\n".join([f"What differs with {name}:", *(f"  - {one}" for one in differences)]))
        whole.settings |= {"unequal": unequal, "left_out": left_out}
        chat = Chat(settings, planned(place)[1], vllm)
        rows = [
            await _row(chat, targets, streamed=kind == "streamed", streams=streams)
            for kind in settings.kinds
            for streams in settings.streams
        ]
    whole.tables = [("Chat", rows)]
    return whole, rows


def _launches(
    settings: Settings, place: Workspace, checkouts: dict[str, Workspace], left_out: dict[str, str]
) -> dict[str, Callable[[], Awaitable[Server]]]:
    """Return what starts each target; a Rust front end that cannot be had is noted in `left_out`."""
    launches: dict[str, Callable[[], Awaitable[Server]]] = {HEARTH: partial(HearthServer.launch, place)}
    if SERVE in settings.against:
        launches[SERVE] = partial(VllmServer.launch, place)
    if RUST in settings.against:
        try:
            launches[RUST] = partial(VllmServer.launch, place, rust=rust_frontend())
        except BenchError as error:
            left_out[RUST] = str(error)
            say(f"rust is left out: {error}")
    return launches | {name: partial(HearthServer.launch, theirs) for name, theirs in checkouts.items()}


async def _row(chat: Chat, targets: dict[str, Target], *, streamed: bool, streams: int) -> report.Row:
    """Warm every target up, find out how many requests fill a run, and measure.

    In whole rounds, because the requests of a round begin and end together: a part of one would run half empty.
    """
    name = f"{'streamed' if streamed else 'plain'}, {streams}"
    warm = Run(streamed, streams, max(streams, _FEWEST_REQUESTS), f"warm {name}", seed=10_000 + streams)
    speeds = [(await chat.measure(target, warm))["requests_per_second"] or 0.0 for target in targets.values()]
    rounds = max(_FEWEST_ROUNDS, _FEWEST_REQUESTS // streams, round(speeds[0] * chat.settings.seconds / streams))

    async def measure(target: Target, repeat: int) -> report.Figures:
        return await chat.measure(target, Run(streamed, streams, rounds * streams, f"{repeat} {name}", seed=repeat))

    each = {one: partial(measure, target) for one, target in targets.items()}
    return await report.in_turns(name, each, repeats=chat.settings.repeats, headline="requests_per_second")


@dataclass(frozen=True, slots=True)
class Run:
    """One run: `requests` requests, `streams` at the same time."""

    streamed: bool
    streams: int
    requests: int
    label: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    """How targets are asked; `vllm` sends streamed requests where it is there. `weights` have the tokenizer."""

    settings: Settings
    weights: Path
    vllm: LoadGenerator | None

    async def measure(self, target: Target, run: Run) -> report.Figures:
        """Do one run. Raises `BenchError`."""
        if run.streamed and self.vllm is not None:
            meter = Meter(target.server.pid)
            job = VllmJob(vllm_arguments(self.weights, target.server, self.settings, run), target.server.key)
            found = await self.vllm.run(job)
            used = usage_figures(meter.stop(), found["total_output_tokens"], found["load_cpu_seconds"])
            return vllm_figures(found) | used
        counts = {"streams": run.streams, "requests": run.requests}
        asked = target.server.chat(run.label, self.settings.max_tokens, streamed=run.streamed, **counts)
        result, usage = await target.measure(asked)
        return answer_figures(result) | usage_figures(usage, result.tokens, result.cpu_seconds)


def answer_figures(result: LoadResult) -> report.Figures:
    """Put the answers of a run into figures."""
    return {
        "requests_per_second": len(result.answers) / result.wall_seconds,
        "tokens_per_second": result.tokens / result.wall_seconds,
        **report.percentiles_ms("time_to_first_token", result.first_texts, 50, 95, 99),
        **report.percentiles_ms("inter_token_latency", result.gaps, 50, 95, 99),
        **report.percentiles_ms("latency", result.latencies, 50, 95, 99),
        **report.percentiles_ms("sent_late", result.delays, 95),
        "requests": len(result.answers),
        "wall_seconds": result.wall_seconds,
    }


def vllm_figures(result: dict[str, Any]) -> report.Figures:
    """Put the result document of `vllm bench serve` into the same figures."""
    words = {"time_to_first_token": "ttft", "inter_token_latency": "itl", "latency": "e2el"}
    times = {f"{name}_p{p}_ms": result[f"p{p}_{word}_ms"] for name, word in words.items() for p in (50, 95, 99)}
    return {
        "requests_per_second": result["request_throughput"],
        "tokens_per_second": result["output_throughput"],
        **times,
        "requests": result["completed"],
        "wall_seconds": result["duration"],
    }


def vllm_arguments(weights: Path, server: Server, settings: Settings, run: Run) -> list[str]:
    """Return the command line of `vllm bench serve` for a run."""
    options = {
        "backend": "openai-chat",
        "base-url": f"http://{server.host}:{server.port}",
        "endpoint": "/v1/chat/completions",
        "model": weights,
        "served-model-name": server.model,
        "dataset-name": "random",
        "random-input-len": settings.prompt_tokens,
        "random-output-len": settings.max_tokens,
        "num-prompts": run.requests,
        "max-concurrency": run.streams,
        "seed": run.seed,
        "temperature": 0,
        "ready-check-timeout-sec": 0,
        "percentile-metrics": "ttft,itl,e2el",
        "metric-percentiles": "50,95,99",
    }
    return [*(f"--{name}={value}" for name, value in options.items()), "--ignore-eos", "--disable-tqdm"]


def usage_figures(used: Usage, tokens: int, load_cpu_seconds: float) -> report.Figures:
    """Put what a run cost into figures."""
    return {
        "api_cpu_seconds_per_1000_tokens": used.api_cpu_seconds * 1000 / tokens,
        "engine_cpu_seconds_per_1000_tokens": used.engine_cpu_seconds * 1000 / tokens,
        "load_cpu_seconds_per_1000_tokens": load_cpu_seconds * 1000 / tokens,
        "api_pss_mib": used.api_pss_bytes / 2**20,
        "engine_pss_mib": used.engine_pss_bytes / 2**20,
    }

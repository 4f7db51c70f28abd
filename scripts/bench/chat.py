"""`bench chat`: chat completions of Hearth's server beside vLLM's own servers, or another checkout of Hearth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from bench.figures import Figures, Row, in_turns, percentiles_ms, say
from bench.hearth import HearthServer, Server, Workspace, load_generator, open_workspace, running
from bench.load import NUMBER, LoadJob, LoadResult, VllmJob
from bench.plots import check_plots, save_chat_plot
from bench.processes import BenchError, Child, Meter, Usage, cpu_seconds
from bench.report import JsonFile, MaxTokens, Models, Repeats, Report, WeightsDir, conditions, ending_cleanly, numbers
from bench.vllm_server import VllmServer, planned, rust_frontend

HEARTH, SERVE, RUST = "hearth", "serve", "rust"
TEXT = "Write a few sentences about the weather, the garden and the people who meet there in the evening."
_FEWEST_REQUESTS = 8
_FEWEST_ROUNDS = 2


class Generator(StrEnum):
    """Which load generator sends the requests."""

    VLLM = "vllm"
    LIGHT = "light"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. `seconds` is how long one run should about take."""

    against: tuple[str, ...]
    streams: tuple[int, ...]
    kinds: tuple[str, ...]
    load: Generator
    repeats: int
    seconds: float
    prompt_tokens: int
    max_tokens: int
    method: str = "targets in turns, medians of the repeats, ratios are medians of the ratios within each repeat"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: `requests` requests, `streams` at the same time. `label` must be new, or the prompts are cached."""

    streamed: bool
    streams: int
    requests: int
    label: str
    seed: int = 0


class ChatTarget:
    """A server and the load generators that ask it."""

    def __init__(self, place: Workspace, server: Server, settings: Settings, light: Child, vllm: Child | None) -> None:
        self._place = place
        self._server = server
        self._settings = settings
        self._light = light
        self._vllm = vllm

    async def measure(self, run: Run) -> Figures:
        """Do one run. Raises `BenchError`."""
        return await (self._by_vllm(run, self._vllm) if run.streamed and self._vllm else self._by_light(run))

    async def _by_light(self, run: Run) -> Figures:
        meter = Meter(self._server.pid)
        job = chat_job(
            self._server,
            self._place.model,
            self._settings.max_tokens,
            label=run.label,
            streamed=run.streamed,
            streams=run.streams,
            requests=run.requests,
        )
        result = await self._light.run(job, LoadResult)
        return answer_figures(result) | usage_figures(meter.stop(), tokens_of(result), result.cpu_seconds)

    async def _by_vllm(self, run: Run, child: Child) -> Figures:
        """Drive `vllm bench serve`; it only knows streams."""
        job = VllmJob(vllm_arguments(self._place, self._server, self._settings, run), self._server.key)
        load = [psutil.Process(child.process.pid)]
        meter, before = Meter(self._server.pid), cpu_seconds(load)
        result = await child.run(job, dict[str, Any])
        used = usage_figures(meter.stop(), result["total_output_tokens"], cpu_seconds(load) - before)
        return vllm_figures(result) | used


def chat(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A model of models.yaml, or a folder of weights.")] = "service-plus",
    models: Models = Path("models.yaml"),
    weights_dir: WeightsDir = None,
    against: Annotated[
        str, typer.Option(help="What to compare with: serve, rust, the folder of another checkout, several, or none.")
    ] = SERVE,
    streams: Annotated[str, typer.Option(help="Requests at the same time, one row each.")] = "1,8,32,128",
    kinds: Annotated[str, typer.Option(help="streamed, plain or both.")] = "streamed,plain",
    load: Annotated[
        Generator | None,
        typer.Option(help="What sends streamed requests: vllm bench serve, or our own (light), as for demo models."),
    ] = None,
    repeats: Repeats = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long one run takes.")] = 10.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt of vllm bench serve.")] = 64,
    max_tokens: MaxTokens = 64,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Of all targets' models. Default: as models.yaml says.")
    ] = None,
    json: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load into this PNG file.")] = None,
) -> None:
    """Compare the server with vllm serve or another checkout: requests/s, tokens/s, latencies, CPU and memory."""
    loads = tuple(int(number) for number in numbers(streams, "--streams"))
    chosen = tuple(kind for kind in ("streamed", "plain") if kind in kinds.split(","))
    others = () if against == "none" else tuple(against.split(","))
    if not loads or not chosen or {HEARTH, ""} & {*others}:
        raise typer.BadParameter("--streams, --kinds or --against names nothing that can be measured.")
    engine = {} if compiled is None else {"enforce_eager": not compiled}
    with ending_cleanly(), ExitStack() as stack:
        if plot is not None:
            check_plots()
        place = stack.enter_context(open_workspace(models, model, weights_dir, engine=engine))
        checkouts = {
            Path(name).resolve().name: stack.enter_context(
                open_workspace(models, model, weights_dir, engine=engine, checkout=Path(name).resolve())
            )
            for name in others
            if name not in {SERVE, RUST}
        }
        # A demo model is so fast that vllm bench serve would be measured with it.
        load = load or (Generator.LIGHT if planned(place)[2] else Generator.VLLM)
        settings = Settings(others, loads, chosen, load, repeats, seconds, prompt_tokens, max_tokens)
        report, rows = asyncio.run(_benchmark(settings, place, checkouts))
        report.deliver(json)
        if plot is not None:
            save_chat_plot(rows, plot)


async def _benchmark(settings: Settings, place: Workspace, checkouts: dict[str, Workspace]) -> tuple[Report, list[Row]]:
    left_out: dict[str, str] = {}
    starting = await _starting(settings, place, checkouts, left_out)
    report = Report("chat", asdict(settings), conditions(place))
    say(f"Starting {', '.join(starting)}.")
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(running(*starting.values()))
        light = await stack.enter_async_context(load_generator(place))
        vllm = None
        if settings.load is Generator.VLLM and "streamed" in settings.kinds:
            vllm = await stack.enter_async_context(load_generator(place, "vllm"))
        named = dict(zip(starting, servers, strict=True))
        unequal = {name: server.unequal() for name, server in named.items() if isinstance(server, VllmServer)}
        for name, differences in unequal.items():
            say("\n".join([f"What differs with {name}:", *(f"  - {one}" for one in differences)]))
        report.settings |= {"unequal": unequal, "left_out": left_out}
        targets = {name: ChatTarget(place, server, settings, light, vllm) for name, server in named.items()}
        rows = [
            await _row(settings, targets, streamed=kind == "streamed", streams=streams)
            for kind in settings.kinds
            for streams in settings.streams
        ]
    report.tables = [("Chat", rows)]
    return report, rows


async def _starting(
    settings: Settings, place: Workspace, checkouts: dict[str, Workspace], left_out: dict[str, str]
) -> dict[str, Coroutine[Any, Any, Server]]:
    """Return what starts each target; a Rust front end that cannot be had is noted in `left_out`."""
    starting: dict[str, Coroutine[Any, Any, Server]] = {HEARTH: HearthServer.launch(place)}
    if SERVE in settings.against:
        starting[SERVE] = VllmServer.launch(place)
    if RUST in settings.against:
        try:
            starting[RUST] = VllmServer.launch(place, rust=rust_frontend())
        except BenchError as error:
            left_out[RUST] = str(error)
            say(f"rust is left out: {error}")
    for name, theirs in checkouts.items():
        starting[name] = HearthServer.launch(theirs)
    return starting


async def _row(settings: Settings, targets: dict[str, ChatTarget], *, streamed: bool, streams: int) -> Row:
    """Warm every target up, find out how many requests fill a run, and measure.

    In whole rounds, because the requests of a round begin and end together: a part of one would run half empty.
    """
    name = f"{'streamed' if streamed else 'plain'}, {streams}"
    warm = Run(streamed, streams, max(streams, _FEWEST_REQUESTS), f"warm {name}", seed=10_000 + streams)
    speeds = [(await target.measure(warm))["requests_per_second"] or 0.0 for target in targets.values()]
    rounds = max(_FEWEST_ROUNDS, _FEWEST_REQUESTS // streams, round(speeds[0] * settings.seconds / streams))

    async def measure(target: ChatTarget, repeat: int) -> Figures:
        return await target.measure(Run(streamed, streams, rounds * streams, f"{repeat} {name}", seed=repeat))

    each: dict[str, Callable[[int], Coroutine[Any, Any, Figures]]] = {
        one: partial(measure, target) for one, target in targets.items()
    }
    return await in_turns(name, each, repeats=settings.repeats, headline="requests_per_second")


def chat_body(model: str, max_tokens: int, *, streamed: bool = True, text: str = TEXT) -> dict[str, Any]:
    """Return a request for an answer of exactly `max_tokens` tokens, with a prompt that is new each time."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{NUMBER}. {text}"}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": streamed,
    }
    return body | ({"stream_options": {"include_usage": True}} if streamed else {})


def chat_job(server: Server, model: str, max_tokens: int, *, label: str, streamed: bool = True, **how: Any) -> LoadJob:
    """Return a job of equal chat requests; `how` are fields of `LoadJob`."""
    body = chat_body(model, max_tokens, streamed=streamed)
    return LoadJob(server.host, server.port, server.key, label, [body], **how)


def tokens_of(result: LoadResult) -> int:
    """Return how many tokens were answered."""
    return sum(answer.tokens for answer in result.answers)


def answer_figures(result: LoadResult) -> Figures:
    """Put the answers of a run into figures."""
    answers, wall = result.answers, result.wall_seconds
    first = [answer.text_times[0] - answer.asked for answer in answers if answer.text_times]
    gaps = [after - before for answer in answers for before, after in pairwise(answer.text_times)]
    return {
        "requests_per_second": len(answers) / wall,
        "tokens_per_second": tokens_of(result) / wall,
        **percentiles_ms("time_to_first_token", first, 50, 95, 99),
        **percentiles_ms("inter_token_latency", gaps, 50, 95, 99),
        **percentiles_ms("latency", [answer.seconds for answer in answers], 50, 95, 99),
        **percentiles_ms("sent_late", [answer.started - answer.asked for answer in answers], 95),
        "requests": len(answers),
        "wall_seconds": wall,
    }


def vllm_figures(result: dict[str, Any]) -> Figures:
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


def vllm_arguments(place: Workspace, server: Server, settings: Settings, run: Run) -> list[str]:
    """Return the command line of `vllm bench serve` for a run."""
    _, folder, _ = planned(place)
    options = {
        "backend": "openai-chat",
        "base-url": f"http://{server.host}:{server.port}",
        "endpoint": "/v1/chat/completions",
        "model": folder,
        "served-model-name": place.model,
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


def usage_figures(used: Usage, tokens: int, load_cpu_seconds: float) -> Figures:
    """Put what a run cost into figures."""
    return {
        "api_cpu_seconds_per_1000_tokens": used.api_cpu_seconds * 1000 / tokens,
        "engine_cpu_seconds_per_1000_tokens": used.engine_cpu_seconds * 1000 / tokens,
        "load_cpu_seconds_per_1000_tokens": load_cpu_seconds * 1000 / tokens,
        "api_pss_mib": used.api_pss_bytes / 2**20,
        "engine_pss_mib": used.engine_pss_bytes / 2**20,
    }

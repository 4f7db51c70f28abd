"""Hearth's server beside vLLM's own: `bench chat`, `bench start`, and `bench killed`, how soon it answers again.

`chat` also compares with another checkout of Hearth.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from bench import report, servers
from bench.load import CHAT, BenchError, LoadJob, LoadResult, Work, chat_body, load_generator, run_vllm
from bench.report import listed, numbers, words
from bench.servers import (
    HEARTH,
    RUST,
    SERVE,
    Server,
    Usage,
    planned,
    running,
    rust_frontend,
    say,
    start_hearth,
    start_vllm,
    unequal,
)

from engine import ANSWERS
from engine.pool.model_state import STEADY_SECONDS

Ask: TypeAlias = Callable[[Server, LoadJob], Awaitable[report.Figures]]
_FEWEST_REQUESTS = 8
_FEWEST_ROUNDS = 2
_POLL_SECONDS = 0.02  # each poll takes time from the starting server on a small machine
_LONGEST_SECONDS = 900.0
_ENGINE = "VLLM::EngineCor"  # the kernel keeps 15 letters


@dataclass(frozen=True, kw_only=True)
class Chat(report.Benchmark):
    """Compare the server with vllm serve or another checkout: requests/s, tokens/s, latencies, CPU and memory."""

    model: Annotated[str, typer.Option(help="A model of models.yaml, or a folder of weights.")] = "service-plus"
    against: Annotated[
        Sequence[str],
        listed(words, "What to compare with: serve, rust, folders of other checkouts, or none; with commas."),
    ] = (SERVE,)
    streams: Annotated[Sequence[int], listed(numbers, "Requests at the same time, one row each.")] = (1, 8, 32, 128)
    load: Annotated[
        Literal["vllm", "light"] | None,
        typer.Option(help="What sends streamed requests: vllm bench serve, or ours (light), as for demo models."),
    ] = None
    repeats: report.Repeats = 3
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long one run takes.")] = 10.0
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt of vllm bench serve.")] = 64
    max_tokens: report.MaxTokens = 64
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Of all targets' models. Default: as models.yaml says.")
    ] = None
    method = "targets in turns, medians of the repeats, ratios are medians of the ratios within each repeat"

    async def measure(self) -> report.Report:
        if not self.streams or {HEARTH, ""} & {*self.against}:
            raise typer.BadParameter("--streams or --against names nothing that can be measured.")
        engine = {} if self.compiled is None else {"enforce_eager": not self.compiled}
        async with AsyncExitStack() as stack:
            place = stack.enter_context(self.workspace(engine=engine))
            _, weights, is_demo = planned(place)
            # A demo model is so fast that vllm bench serve would be measured with it.
            load = self.load or ("light" if is_demo else "vllm")
            whole = self.begin(place)
            whole.settings["load"] = load
            starts: dict[str, servers.Start] = {HEARTH: partial(start_hearth, place)}
            for name in [one for one in (SERVE, RUST) if one in self.against]:
                starts[name] = partial(start_vllm, place, rust_frontend() if name == RUST else None)
                say("\n".join([f"What differs with {name}:", *(f"  - {one}" for one in unequal(rust=name == RUST))]))
            for checkout in [Path(name).resolve() for name in self.against if name not in {SERVE, RUST}]:  # noqa: ASYNC240
                theirs = stack.enter_context(self.workspace(engine=engine, checkout=checkout))
                starts[checkout.name] = partial(start_hearth, theirs)
            servers = await stack.enter_async_context(running(place, starts))
            asks: dict[str, Ask] = {"streamed": _ask, "plain": _ask}
            if load == "vllm":
                generator = stack.enter_context(load_generator(place.environment, place.log("vllm"), run_vllm))
                asks["streamed"] = partial(self._ask_by_vllm, generator, weights)
            rows = [await self._row(servers, ask, kind, n) for kind, ask in asks.items() for n in self.streams]
        whole.tables = [("Chat", rows)]
        return whole

    async def _row(self, servers: dict[str, Server], ask: Ask, kind: str, streams: int) -> report.Row:
        """Warm every server up, find out how many requests fill a run, and measure.

        In whole rounds, because the requests of a round begin and end together: a partial round would be half empty.
        """
        case, streamed = f"{kind}, {streams}", kind == "streamed"

        async def run(server: Server, label: object, requests: int) -> report.Figures:
            how: dict[str, Any] = {"streamed": streamed, "streams": streams, "requests": requests}
            return await ask(server, server.chat(f"{label} {case}", self.max_tokens, **how))

        warm = [await run(server, "warm", max(streams, _FEWEST_REQUESTS)) for server in servers.values()]
        fill = round((warm[0]["requests_per_second"] or 0.0) * self.seconds / streams)
        requests = streams * max(_FEWEST_ROUNDS, _FEWEST_REQUESTS // streams, fill)
        measure = partial(run, requests=requests)
        return await report.in_turns(case, servers, measure, self.repeats, "requests_per_second")

    async def _ask_by_vllm(self, generator: Work, weights: Path, server: Server, job: LoadJob) -> report.Figures:
        """Do a job with `vllm bench serve`, which takes the tokenizer from `weights`."""
        options = {
            "backend": "openai-chat",
            "base-url": f"http://{job.host}:{job.port}",
            "endpoint": job.path,
            "model": weights,
            "served-model-name": server.model,
            "dataset-name": "random",
            "random-input-len": self.prompt_tokens,
            "random-output-len": self.max_tokens,
            "num-prompts": job.requests,
            "max-concurrency": job.streams,
            "seed": zlib.crc32(job.label.encode()),
            "temperature": 0,
            "ready-check-timeout-sec": 0,
            "percentile-metrics": "ttft,itl,e2el",
            "metric-percentiles": "50,95,99",
        }
        arguments = [*(f"--{name}={value}" for name, value in options.items()), "--ignore-eos", "--disable-tqdm"]
        found, used = await server.measure((job.key, arguments), generator)
        return vllm_figures(found) | usage_figures(used, found["total_output_tokens"], found["load_cpu_seconds"])


async def _ask(server: Server, job: LoadJob) -> report.Figures:
    result, used = await server.measure(job)
    return answer_figures(result) | usage_figures(used, result.tokens, result.cpu_seconds)


def answer_figures(result: LoadResult) -> report.Figures:
    return {
        "requests_per_second": len(result.answers) / result.wall_seconds,
        "tokens_per_second": result.tokens / result.wall_seconds,
        **report.percentiles_ms("time_to_first_token", result.first_texts, 50, 95, 99),
        **report.percentiles_ms("inter_token_latency", result.gaps, 50, 95, 99),
        **report.percentiles_ms("latency", result.latencies, 50, 95, 99),
    }


def vllm_figures(result: dict[str, Any]) -> report.Figures:
    """Put the result document of `vllm bench serve` into the same figures."""
    theirs = {"time_to_first_token": "ttft", "inter_token_latency": "itl", "latency": "e2el"}
    return {
        "requests_per_second": result["request_throughput"],
        "tokens_per_second": result["output_throughput"],
        **{f"{name}_p{p}_ms": result[f"p{p}_{short}_ms"] for name, short in theirs.items() for p in (50, 95, 99)},
    }


def usage_figures(used: Usage, tokens: int, load_cpu_seconds: float) -> report.Figures:
    return {
        "api_cpu_seconds_per_1000_tokens": used.api_cpu_seconds * 1000 / tokens,
        "engine_cpu_seconds_per_1000_tokens": used.engine_cpu_seconds * 1000 / tokens,
        "load_cpu_seconds_per_1000_tokens": load_cpu_seconds * 1000 / tokens,
        "api_pss_mib": used.api_pss_bytes / 2**20,
        "engine_pss_mib": used.engine_pss_bytes / 2**20,
    }


@dataclass(frozen=True, kw_only=True)
class Start(report.Benchmark):
    """Measure start-up: alive, answering, all models ready; Hearth with all models, with one, and vllm serve."""

    against: Annotated[Sequence[str], listed(words, "What to compare with: serve, rust, both or none.")] = (SERVE,)
    repeats: report.Repeats = 3
    method = "started, asked and stopped in turns; medians; ratios within each repeat"

    async def measure(self) -> report.Report:
        if not {*self.against} <= {SERVE, RUST}:
            raise typer.BadParameter(f"{self.against} is not a list of serve, rust", param_hint="--against")
        beside = [name for name in servers.model_entries(self.models) if name != self.model]
        with self.workspace(beside=beside) as everything, self.workspace() as alone:
            whole = self.begin(everything)
            starts: dict[str, servers.Start] = {
                # Makes the key, and thereby the database: every start finds a used data directory.
                f"hearth, {name}": partial(servers.start_hearth, place, await servers.create_key(place))
                for name, place in {"all models": everything, "one model": alone}.items()
            }
            for name in self.against:
                starts[name] = partial(start_vllm, alone, rust_frontend() if name == RUST else None)
            servers.say(f"Starting {', '.join(starts)} in turns:")
            row = await report.in_turns("start", starts, _measured, self.repeats, "answered_seconds")
        whole.tables = [("Start", [row])]
        return whole


@dataclass(frozen=True, kw_only=True)
class Killed(report.Benchmark):
    """Measure the seconds from kill -9 of an engine to the next answer."""

    kills: Annotated[int, typer.Option(min=1, help="How often the engine is killed.")] = 5
    method = "kill -9 of the idle engine, then one request after the other until one is answered"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            since = time.perf_counter()

            async def kill(server: Server, repeat: int) -> report.Figures:
                nonlocal since
                # A model that dies earlier is loaded with a back-off.
                await asyncio.sleep(max(0.0, since + STEADY_SECONDS + 1 - time.perf_counter()))
                await _first_answer(server, f"before {repeat}")
                engines = [process for process in servers.family(server.pid)[1] if process.name().startswith(_ENGINE)]
                if len(engines) != 1:
                    raise BenchError(f"The server has {len(engines)} engine processes, not one: nothing is killed.")
                began = time.perf_counter()
                os.kill(engines[0].pid, signal.SIGKILL)
                refused = await _first_answer(server, f"after {repeat}", began=began)
                since = time.perf_counter()
                return {"answered_seconds": since - began, "refused_ms": refused}

            row = await report.in_turns("kill", {HEARTH: server}, kill, self.kills, "answered_seconds")
        whole.tables = [("After kill -9 of the engine", [row])]
        return whole


async def _measured(start: servers.Start, repeat: int) -> report.Figures:
    """Start a server, ask it, and stop it. Raises `BenchError`."""
    began = time.perf_counter()
    server = await start()
    try:
        async with asyncio.timeout(_LONGEST_SECONDS):
            figures = await _moments(server, repeat, began)
        everything = [process for part in servers.family(server.pid) for process in part]
        return figures | {
            "cpu_seconds": servers.cpu_seconds(everything),
            "pss_mib": servers.pss_bytes(everything) / 2**20,
        }
    finally:
        await server.stop()


async def _moments(server: Server, repeat: int, began: float) -> report.Figures:
    """Return when it was alive, answered a chat, and had all models ready; for `vllm serve` all are the same."""
    figures: report.Figures = {"live_seconds": None, "answered_seconds": None, "ready_seconds": None}
    live = "/health/live" if server.name == HEARTH else "/health"
    while (await asyncio.to_thread(server.ask, live))[0] != 200:
        await server.pause(_POLL_SECONDS)
    figures["live_seconds"] = time.perf_counter() - began
    while figures["ready_seconds"] is None or figures["answered_seconds"] is None:
        states = await server.states()
        for name in [name for name, state in states.items() if state in ANSWERS]:
            figures.setdefault(f"{name}_ready_seconds", time.perf_counter() - began)
        if states and ANSWERS.issuperset(states.values()):
            figures["ready_seconds"] = figures["ready_seconds"] or time.perf_counter() - began
        if figures["answered_seconds"] is None and states.get(server.model) in ANSWERS:
            await _first_answer(server, f"start {repeat}")
            figures["answered_seconds"] = time.perf_counter() - began
        await server.pause(_POLL_SECONDS)
    return figures


async def _first_answer(server: Server, label: str, *, began: float = 0.0) -> float | None:
    """Chat until there is an answer; return the time of the first refusal, in ms since `began`, None without one.

    Raises `BenchError` when the server has ended, or the request is wrong.
    """
    refused, body = None, chat_body(server.model, 1, streamed=False, text=label)
    async with asyncio.timeout(_LONGEST_SECONDS):
        while True:
            status, answer = await asyncio.to_thread(server.ask, CHAT, body)
            if status == 200:
                return refused
            if 0 < status < 500:
                raise BenchError(f"{label} was not answered: status {status}: {answer.decode(errors='replace')}")
            refused = refused or (time.perf_counter() - began) * 1000
            await server.pause(_POLL_SECONDS)

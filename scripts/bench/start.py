"""`bench start` and `bench killed`: how soon a server answers, and how soon again after its engine was killed."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from bench import report, servers
from bench.load import CHAT, BenchError, chat_body
from bench.report import listed, words
from bench.servers import HEARTH, RUST, SERVE, Server, rust_frontend, start_vllm

from engine import ANSWERS
from engine.pool.model_state import STEADY_SECONDS

_POLL_SECONDS = 0.02  # every question costs the starting server time on a small machine
_LONGEST_SECONDS = 900.0
_ENGINE = "VLLM::EngineCor"  # the kernel keeps 15 letters


@dataclass(frozen=True, kw_only=True)
class Start(report.Benchmark):
    """Measure start-up: alive, answering, all models ready; Hearth with all models, with one, and vllm serve."""

    against: Annotated[Sequence[str], listed(words, "What to compare with: serve, rust, both or none.")] = (SERVE,)
    repeats: report.Repeats = 3
    method = "started, asked and stopped in turns; medians; ratios within each repeat"

    async def measure(self) -> report.Report:
        if not {*self.against} <= {SERVE, RUST}:
            raise typer.BadParameter(f"{self.against} is no list of serve, rust", param_hint="--against")
        beside = [name for name in servers.model_entries(self.models) if name != self.model]
        with self.workspace(beside=beside) as everything, self.workspace() as alone:
            whole = self.begin(everything)
            starts: dict[str, servers.Start] = {
                # The key, and with it the database: every start finds a data directory that has been used before.
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

    kills: Annotated[int, typer.Option(min=1, help="How often its engine is killed.")] = 5
    method = "kill -9 of the idle engine, then one request after the other until one is answered"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            since = time.perf_counter()

            async def kill(server: Server, repeat: int) -> report.Figures:
                nonlocal since
                # A model that dies sooner is loaded with a back-off.
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
    """Return when it was alive, answered a chat, and had all models ready; `vllm serve` says all that at once."""
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
    """Chat until there is an answer; return when the first refusal came, in ms since `began`, None without one.

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

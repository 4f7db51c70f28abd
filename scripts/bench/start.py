"""`bench start` and `bench killed`: how soon a server answers, and how soon again after its engine was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from bench import report
from bench.chat import RUST, SERVE
from bench.load import BenchError, run_load
from bench.servers import (
    START_SECONDS,
    HearthServer,
    Server,
    Workspace,
    cpu_seconds,
    create_key,
    family,
    model_entries,
    open_workspace,
    pss_bytes,
    running,
    say,
)
from bench.vllm_server import VllmServer, rust_frontend

from engine import ANSWERS
from engine.pool.model_state import STEADY_SECONDS

_POLL_SECONDS = 0.02  # every question costs the starting server time on a small machine
_ENGINE = "VLLM::EngineCor"  # the kernel keeps 15 letters


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    against: tuple[str, ...]
    repeats: int
    method: str


def start(  # noqa: PLR0913  # one argument per option
    *,
    model: report.Model = "service-plus",
    models: report.Models = Path("models.yaml"),
    weights_dir: report.WeightsDir = None,
    against: Annotated[str, typer.Option(help="What to compare with: serve, rust, both or none.")] = SERVE,
    repeats: report.Repeats = 3,
    json: report.JsonFile = None,
) -> None:
    """Measure start-up: alive, answering, all models ready; Hearth with all models, with one, and vllm serve."""
    others = () if against == "none" else tuple(against.split(","))
    if not {*others} <= {SERVE, RUST}:
        raise typer.BadParameter(f"{against!r} is no list of serve, rust", param_hint="--against")
    settings = Settings(others, repeats, "started, asked and stopped in turns; medians; ratios within each repeat")
    with ExitStack() as stack:
        beside = [name for name in model_entries(models) if name != model]
        everything = stack.enter_context(open_workspace(models, model, weights_dir, beside=beside))
        alone = stack.enter_context(open_workspace(models, model, weights_dir))
        asyncio.run(_start(settings, everything, alone)).deliver(json)


def killed(
    *,
    model: report.Model = "service-plus",
    models: report.Models = Path("models.yaml"),
    weights_dir: report.WeightsDir = None,
    kills: Annotated[int, typer.Option(min=1, help="How often its engine is killed.")] = 5,
    json: report.JsonFile = None,
) -> None:
    """Measure the seconds from kill -9 of an engine to the next answer."""
    settings = Settings((), kills, "kill -9 of the idle engine, then one request after the other until one is answered")
    with open_workspace(models, model, weights_dir) as place:
        asyncio.run(_killed(settings, place)).deliver(json)


async def _start(settings: Settings, everything: Workspace, alone: Workspace) -> report.Report:
    whole = report.begin("start", settings, everything)
    targets: dict[str, Callable[[int], Awaitable[report.Figures]]] = {}
    for name, place in {"hearth, all models": everything, "hearth, one model": alone}.items():
        # The key, and with it the database: every start finds a data directory that has been used before.
        targets[name] = partial(_measured, partial(HearthServer.launch, place, await create_key(place)))
    for name in settings.against:
        rust = rust_frontend() if name == RUST else None
        targets[name] = partial(_measured, partial(VllmServer.launch, alone, rust=rust))
    say(f"Starting {', '.join(targets)} in turns:")
    row = await report.in_turns("start", targets, repeats=settings.repeats, headline="answered_seconds")
    whole.tables = [("Start", [row])]
    return whole


async def _measured(launch: Callable[[], Awaitable[Server]], repeat: int) -> report.Figures:
    """Start a server, ask it, and stop it. Raises `BenchError`."""
    began = time.perf_counter()
    server = await launch()
    try:
        async with asyncio.timeout(START_SECONDS):
            figures = await _moments(server, repeat, began)
        everything = [process for part in family(server.pid) for process in part]
        return figures | {"cpu_seconds": cpu_seconds(everything), "pss_mib": pss_bytes(everything) / 2**20}
    except TimeoutError:
        raise BenchError(f"A server was not ready after {START_SECONDS:.0f} s.") from None
    finally:
        await server.stop()


async def _moments(server: Server, repeat: int, began: float) -> report.Figures:
    """Return when it was alive, answered a chat, and had all models ready; `vllm serve` says all that at once."""
    figures: report.Figures = {"live_seconds": None, "answered_seconds": None, "ready_seconds": None}
    live = "/health/live" if isinstance(server, HearthServer) else server.health
    while (await server.get(live))[0] != 200:
        await _pause(server)
    figures["live_seconds"] = time.perf_counter() - began
    while figures["ready_seconds"] is None or figures["answered_seconds"] is None:
        states = await server.states() if isinstance(server, HearthServer) else {server.model: next(iter(ANSWERS))}
        if "failed" in states.values():
            raise BenchError("A model cannot be loaded. Start the server by hand to see why.")
        for name, state in states.items():
            if state in ANSWERS:
                figures.setdefault(f"{name}_ready_seconds", time.perf_counter() - began)
        if states and ANSWERS.issuperset(states.values()):
            figures["ready_seconds"] = figures["ready_seconds"] or time.perf_counter() - began
        if figures["answered_seconds"] is None and states.get(server.model) in ANSWERS:
            await first_answer(server, f"start {repeat}")
            figures["answered_seconds"] = time.perf_counter() - began
        await _pause(server)
    return figures


async def _killed(settings: Settings, place: Workspace) -> report.Report:
    whole = report.begin("killed", settings, place)
    async with running(place, partial(HearthServer.launch, place)) as (target,):
        server = target.server
        since = time.perf_counter()

        async def kill(repeat: int) -> report.Figures:
            nonlocal since
            # A model that dies sooner is loaded with a back-off.
            await asyncio.sleep(max(0.0, since + STEADY_SECONDS + 1 - time.perf_counter()))
            await first_answer(server, f"before {repeat}")
            engines = [process for process in family(server.pid)[1] if process.name().startswith(_ENGINE)]
            if len(engines) != 1:
                raise BenchError(f"The server has {len(engines)} engine processes, not one: nothing is killed.")
            began = time.perf_counter()
            os.kill(engines[0].pid, signal.SIGKILL)
            refused = await first_answer(server, f"after {repeat}", began=began)
            since = time.perf_counter()
            return {"answered_seconds": since - began, "refused_ms": refused}

        row = await report.in_turns("kill", {"hearth": kill}, repeats=settings.repeats, headline="answered_seconds")
    whole.tables = [("After kill -9 of the engine", [row])]
    return whole


async def first_answer(server: Server, label: str, *, began: float = 0.0) -> float | None:
    """Ask until there is an answer; return when the first refusal came, in ms since `began`, None without one.

    Raises `BenchError` when the server has ended, or the request is wrong.
    """
    job = server.chat(label, 1, streamed=False, streams=1, requests=1, strict=False)
    refused = None
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                (answer,) = (await run_load(job)).answers
            except BenchError:  # nothing listens
                answer = None
            if answer is not None and 0 < answer.status < 500:
                if answer.problem:
                    raise BenchError(f"A chat was not answered: {answer.problem}")
                return refused
            refused = refused or (time.perf_counter() - began) * 1000
            await _pause(server)


async def _pause(server: Server) -> None:
    if server.ended:
        raise BenchError("The server ended by itself.")
    await asyncio.sleep(_POLL_SECONDS)

"""Servers that are started to be measured: when each first lives, answers a chat, and has all models ready."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import psutil

from benchmarks.chat_job import ChatJob
from benchmarks.chat_targets import START_SECONDS
from benchmarks.errors import BenchError
from benchmarks.footprint import cpu_seconds, family, pss_bytes
from benchmarks.hearth import HearthServer, create_key, states
from benchmarks.http_answers import Answer, AnswerError, Connection
from benchmarks.load import encode
from benchmarks.vllm_server import VllmServer, free_port, status_of
from engine import ANSWERS
from engine.pool.model_state import STEADY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

_T = TypeVar("_T")

_POLL_SECONDS = 0.02  # every question costs the starting server time on a small machine
_ENGINE = "VLLM::EngineCor"  # the kernel keeps 15 letters


@dataclass(frozen=True, slots=True)
class StartJob:
    """Which model is asked for a first answer; `number` sets the prompts of the starts apart."""

    model: str
    number: int


class Started(Protocol):
    """A server that was started and may not answer yet."""

    key: str
    host: str
    port: int

    @property
    def pid(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    async def stop(self) -> None: ...


class HearthStart:
    """Starts `hearth serve` anew for each run, on a data directory that has been used before."""

    def __init__(self, name: str, place: Workplace, key: str) -> None:
        self.name = name
        self._place = place
        self._key = key

    @classmethod
    async def prepare(cls, name: str, place: Workplace) -> HearthStart:
        """Make the key, and the database with it. Raises `BenchError`."""
        return cls(name, place, await create_key(place, "bench"))

    async def measure(self, job: StartJob) -> Figures:
        """Start it, and end it again. Raises `BenchError`."""
        began = time.perf_counter()
        server = await HearthServer.launch(self._place, self._key, port=free_port())
        try:
            async with asyncio.timeout(START_SECONDS):
                return await _hearth_figures(server, job, began)
        except TimeoutError:
            raise BenchError(f"{self.name}: not ready after {START_SECONDS:.0f} s.") from None
        finally:
            await server.stop()


class VllmStart:
    """Starts `vllm serve` anew for each run."""

    def __init__(self, name: str, place: Workplace, rust: Path | None) -> None:
        self.name = name
        self._place = place
        self._rust = rust

    async def measure(self, job: StartJob) -> Figures:
        """Start it, and end it again. Raises `BenchError`."""
        began = time.perf_counter()
        server = await VllmServer.launch(self._place, rust=self._rust, name=self.name)
        try:
            async with asyncio.timeout(START_SECONDS):
                await server.ready()
                ready = time.perf_counter() - began
                await first_answer(server, job)
                answered = time.perf_counter() - began
            figures = {"live_seconds": ready, "answered_seconds": answered, "ready_seconds": ready}
            return figures | {f"ready_{job.model}_seconds": ready} | _taken(server.pid)
        except TimeoutError:
            raise BenchError(f"{self.name}: not ready after {START_SECONDS:.0f} s.") from None
        finally:
            await server.stop()


class KilledEngine:
    """A running Hearth whose engine is killed in each run, once it has lived for so long that there is no back-off."""

    name = "hearth"

    def __init__(self, server: HearthServer) -> None:
        self._server = server
        self._lives_since = time.perf_counter()

    @classmethod
    async def start(cls, place: Workplace) -> KilledEngine:
        """Start it and wait until the model is ready. Raises `BenchError`."""
        return cls(await HearthServer.start(place, within_seconds=START_SECONDS))

    async def measure(self, job: StartJob) -> Figures:
        """Kill the engine and ask until there is an answer. Raises `BenchError`."""
        await asyncio.sleep(max(0.0, self._lives_since + STEADY_SECONDS + 1 - time.perf_counter()))
        await first_answer(self._server, job)
        engines = [process for process in family(self._server.pid)[1] if process.name().startswith(_ENGINE)]
        if len(engines) != 1:
            raise BenchError(f"The server has {len(engines)} engine processes, not one: nothing is killed.")
        began = time.perf_counter()
        os.kill(engines[0].pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(START_SECONDS):
                refused = await first_answer(self._server, job, began=began)
        except TimeoutError:
            raise BenchError(f"No answer for {START_SECONDS:.0f} s after the engine was killed.") from None
        self._lives_since = time.perf_counter()
        return {"answered_seconds": self._lives_since - began, "refused_ms": refused}

    async def stop(self) -> None:
        """End it."""
        await self._server.stop()


async def first_answer(server: Started, job: StartJob, *, began: float = 0.0) -> float | None:
    """Ask until there is an answer; return when the first refusal came, in ms since `began`, None without one.

    Raises `BenchError` when the server has ended.
    """
    chat = ChatJob(job.model, 1, 1, streamed=False, max_tokens=1, label=f"start-{job.number}")
    request, refused = encode(chat, 0, host=server.host, key=server.key), None
    while True:
        answer = await _asked(server, request)
        if answer is not None and answer.status < 500:
            answer.completion_tokens()  # or says what is wrong with the request
            return refused
        refused = refused or (time.perf_counter() - began) * 1000
        await asyncio.sleep(_POLL_SECONDS)


async def _asked(server: Started, request: bytes) -> Answer | None:
    try:
        connection = await Connection.open(server.host, server.port)
        try:
            return await connection.ask(request)
        finally:
            connection.close()
    except AnswerError:
        if server.ended:
            raise
        return None


async def _hearth_figures(server: HearthServer, job: StartJob, began: float) -> Figures:
    def since() -> float:
        return time.perf_counter() - began

    live = await _until(server, lambda: since() if status_of(server.host, server.port, "/health/live") == 200 else None)
    figures: Figures = {"live_seconds": live, "answered_seconds": None, "ready_seconds": None}
    while figures["ready_seconds"] is None:
        found = await _until(server, lambda: states(server.host, server.port))
        for model, state in found.items():
            if state == "failed":
                raise BenchError(f"{model} cannot be loaded. Start the server by hand to see why.")
            if state in ANSWERS:
                figures.setdefault(f"ready_{model}_seconds", since())
        if figures["answered_seconds"] is None and found.get(job.model) in ANSWERS:
            await first_answer(server, job)
            figures["answered_seconds"] = since()
        if found and ANSWERS.issuperset(found.values()):
            figures["ready_seconds"] = since()
        await asyncio.sleep(_POLL_SECONDS)
    return figures | _taken(server.pid)


async def _until(server: Started, look: Callable[[], _T | None]) -> _T:
    while not server.ended:
        found = await asyncio.to_thread(look)
        if found is not None:
            return found
        await asyncio.sleep(_POLL_SECONDS)
    raise BenchError("The server ended by itself.")


def _taken(pid: int) -> Figures:
    try:
        everyone = [process for part in family(pid) for process in part]
        return {
            "cpu_seconds": sum(map(cpu_seconds, everyone)),
            "pss_mib": sum(pss_bytes(process.pid) for process in everyone) / 2**20,
        }
    except psutil.Error as error:
        raise BenchError(f"A process ended while it was measured: {error}") from error

"""What `bench chat` compares: servers under load over HTTP, Hearth's and vLLM's, and Hearth's engine alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil

from benchmarks.chat_job import Measurement, chat_figures
from benchmarks.children import Child
from benchmarks.compare import say
from benchmarks.errors import BenchError
from benchmarks.footprint import Footprint, Meter
from benchmarks.hearth import HearthServer
from benchmarks.load import KEY_VARIABLE
from benchmarks.rust_frontend import rust_frontend
from benchmarks.vllm_server import VllmServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence

    from benchmarks.chat_job import ChatJob
    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

SERVER, BARE, SERVE, RUST = "server", "bare", "serve", "rust"
START_SECONDS = 900.0  # a large model is read from a slow disk


class ChatTarget(Protocol):
    """A loaded model that does runs of chat requests."""

    name: str

    async def measure(self, job: ChatJob) -> Figures: ...

    async def stop(self) -> None: ...

    def unequal(self) -> list[str]:
        """Say what of it differs from Hearth."""
        ...


T = TypeVar("T", bound=ChatTarget)


class Server(Protocol):
    """Something that answers chat requests over HTTP."""

    key: str
    host: str
    port: int

    @property
    def pid(self) -> int: ...

    async def stop(self) -> None: ...


class ServerTarget:
    """A real server, and the load generator that asks it."""

    def __init__(self, name: str, server: Server, load: Child, unequal: Sequence[str] = ()) -> None:
        self.name = name
        self._server = server
        self._load = load
        self._unequal = unequal

    @classmethod
    async def start(cls, place: Workplace, name: str = SERVER) -> ServerTarget:
        """Start Hearth and its load generator and wait until the model is ready. Raises `BenchError`."""
        server = await HearthServer.start(place, within_seconds=START_SECONDS)
        return cls(name, server, await load_generator(place, server, name))

    @classmethod
    async def start_vllm(cls, place: Workplace, name: str) -> ServerTarget:
        """Do the same with `vllm serve`, and its Rust front end if `name` says so. Raises `BenchError`."""
        rust = await rust_frontend() if name == RUST else None
        server = await VllmServer.start(place, rust=rust, name=name, within_seconds=START_SECONDS)
        return cls(name, server, await load_generator(place, server, name), server.unequal())

    async def measure(self, job: ChatJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        seen, footprint = await _metered(self._load, job, self._server.pid)
        return chat_figures(seen, footprint, load_cpu_seconds=seen.cpu_seconds)

    def unequal(self) -> list[str]:
        return [*self._unequal]

    async def stop(self) -> None:
        """End both."""
        await self._load.stop()
        await self._server.stop()


class BareTarget:
    """The engine without HTTP, in one process that also asks it."""

    name = BARE

    def __init__(self, child: Child) -> None:
        self._child = child

    @classmethod
    async def start(cls, place: Workplace) -> BareTarget:
        """Start it and wait until the model is loaded. Raises `BenchError`."""
        child = await Child.start(
            "bare engine",
            "benchmarks.bare",
            *(str(place.models), str(place.weights_dir)),
            environment=place.environment,
            log=place.log("bare"),
        )
        try:
            await child.prepared(START_SECONDS)
        except BaseException:
            await child.stop()
            raise
        return cls(child)

    async def measure(self, job: ChatJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        seen, footprint = await _metered(self._child, job, self._child.process.pid)
        # By its own clock, which does not run while it renders the prompts.
        footprint = dataclasses.replace(footprint, api_cpu_seconds=seen.cpu_seconds)
        return chat_figures(seen, footprint, load_cpu_seconds=None)

    def unequal(self) -> list[str]:
        return []

    async def stop(self) -> None:
        """End it."""
        await self._child.stop()


@asynccontextmanager
async def started(place: Workplace, names: Sequence[str], left_out: dict[str, str]) -> AsyncIterator[list[ChatTarget]]:
    """Start the server and the others named, at the same time: they mostly wait for their imports.

    A Rust front end that cannot be had is noted in `left_out` instead. Raises `BenchError`.
    """
    names = [SERVER, *names]
    if RUST in names:
        try:
            await rust_frontend()
        except BenchError as error:
            left_out[RUST] = str(error)
            names.remove(RUST)
            say(f"rust is left out: {error}")
    say(f"Starting {', '.join(names)}; each loads the model.")
    async with all_started([_start(place, name) for name in names]) as targets:
        yield targets


@asynccontextmanager
async def all_started(starting: Sequence[Coroutine[Any, Any, T]]) -> AsyncIterator[list[T]]:
    """Start targets at the same time and end them in the end. Raises `BenchError`."""
    began = time.monotonic()
    starts = [asyncio.create_task(start) for start in starting]
    try:
        targets = await asyncio.gather(*starts)
        say(f"All are ready after {time.monotonic() - began:.0f} s.")
        yield targets
    finally:
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        await asyncio.gather(*(target.stop() for target in outcomes if not isinstance(target, BaseException)))


async def _start(place: Workplace, name: str) -> ChatTarget:
    if name == BARE:
        return await BareTarget.start(place)
    if name == SERVER:
        return await ServerTarget.start(place)
    return await ServerTarget.start_vllm(place, name)


async def load_generator(place: Workplace, server: Server, name: str) -> Child:
    """Start the process that asks a server."""
    return await Child.start(
        f"load generator of {name}",
        "benchmarks.load",
        *(server.host, str(server.port)),
        environment=place.environment | {KEY_VARIABLE: server.key},
        log=place.log(f"load-{name}"),
    )


async def _metered(driver: Child, job: ChatJob, owner_pid: int) -> tuple[Measurement, Footprint]:
    try:
        meter = Meter(owner_pid)
        seen = await driver.run(job, Measurement)
        return seen, meter.stop()
    except psutil.Error as error:
        raise BenchError(f"A process ended while it was measured: {error}") from error

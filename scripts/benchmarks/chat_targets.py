"""The two things that `bench chat` compares: Hearth's server under load over HTTP, and its engine alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import psutil

from benchmarks.chat_job import Measurement, chat_figures
from benchmarks.children import Child
from benchmarks.errors import BenchError
from benchmarks.footprint import Footprint, Meter
from benchmarks.hearth import HearthServer
from benchmarks.load import KEY_VARIABLE

if TYPE_CHECKING:
    from benchmarks.chat_job import ChatJob
    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

_START_SECONDS = 900.0  # a large model is read from a slow disk


class ServerTarget:
    """A real server, and the load generator that asks it."""

    name = "server"

    def __init__(self, server: HearthServer, load: Child) -> None:
        self._server = server
        self._load = load

    @classmethod
    async def start(cls, place: Workplace) -> ServerTarget:
        """Start both and wait until the model is ready. Raises `BenchError`."""
        server = await HearthServer.start(place, within_seconds=_START_SECONDS)
        load = await Child.start(
            "load generator",
            "benchmarks.load",
            *(server.host, str(server.port)),
            environment=place.environment | {KEY_VARIABLE: server.key},
            log=place.log("load"),
        )
        return cls(server, load)

    async def measure(self, job: ChatJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        seen, footprint = await _metered(self._load, job, self._server.pid)
        return chat_figures(seen, footprint, load_cpu_seconds=seen.cpu_seconds)

    async def stop(self) -> None:
        """End both."""
        await self._load.stop()
        await self._server.stop()


class BareTarget:
    """The engine without HTTP, in one process that also asks it."""

    name = "bare"

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
            await child.prepared(_START_SECONDS)
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

    async def stop(self) -> None:
        """End it."""
        await self._child.stop()


async def _metered(driver: Child, job: ChatJob, owner_pid: int) -> tuple[Measurement, Footprint]:
    try:
        meter = Meter(owner_pid)
        seen = await driver.run(job, Measurement)
        return seen, meter.stop()
    except psutil.Error as error:
        raise BenchError(f"A process ended while it was measured: {error}") from error

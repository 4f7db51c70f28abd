"""What `bench batch` compares, all on one real server: a batch with single requests, a busy server with an idle one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import psutil

from benchmarks.batch_job import (
    BatchJobs,
    BatchMeasurement,
    InteractiveMeasurement,
    batch_figures,
    interactive_figures,
)
from benchmarks.children import Child
from benchmarks.errors import BenchError
from benchmarks.footprint import Meter
from benchmarks.hearth import HearthServer
from benchmarks.load import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

_START_SECONDS = 900.0  # a large model is read from a slow disk
_REST_SECONDS = 4.0
_LEAD_SECONDS = 1.0


class Bench:
    """The server and the two processes that ask it."""

    def __init__(self, server: HearthServer, batches: Child, interactive: Child) -> None:
        self.server = server
        self.batches = batches
        self.interactive = interactive


@contextlib.asynccontextmanager
async def started(place: Workplace) -> AsyncIterator[Bench]:
    """Start all three, wait until the model is ready, and end them in the end. Raises `BenchError`."""
    async with contextlib.AsyncExitStack() as stack:
        server = await HearthServer.start(place, within_seconds=_START_SECONDS)
        stack.push_async_callback(server.stop)
        senders = []
        for name, module in (("batch sender", "batch_load"), ("interactive sender", "interactive_load")):
            sender = await Child.start(
                name,
                f"benchmarks.{module}",
                *(server.host, str(server.port)),
                environment=place.environment | {KEY_VARIABLE: server.key},
                log=place.log(module),
            )
            stack.push_async_callback(sender.stop)
            senders.append(sender)
        yield Bench(server, *senders)


class BatchTarget:
    """All items in one request."""

    name = "batch"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def measure(self, job: BatchJobs) -> Figures:
        """Do one run. Raises `BenchError`."""
        return await _items(self._bench, job, batched=True)


class SingleTarget:
    """The good items alone, each a plain request, all at the same time."""

    name = "single"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def measure(self, job: BatchJobs) -> Figures:
        """Do one run. Raises `BenchError`."""
        return await _items(self._bench, job, batched=False)


async def _items(bench: Bench, job: BatchJobs, *, batched: bool) -> Figures:
    # Both ask the same server. Single requests are interactive ones, which make it hold back batches for a while;
    # and with the same label the second would find all prompts in the cache.
    await asyncio.sleep(_REST_SECONDS)
    label = f"{job.batch.label}{'b' if batched else 's'}"
    order = msgspec.structs.replace(job.batch, batched=batched, label=label, seconds=0.0)
    try:
        meter = Meter(bench.server.pid)
        seen = await bench.batches.run(order, BatchMeasurement)
        return batch_figures(seen, meter.stop())
    except psutil.Error as error:
        raise BenchError(f"A process ended while it was measured: {error}") from error


async def _lead_in(bench: Bench, job: BatchJobs, label: str) -> None:
    """Begin to ask before it counts: measured are batches that come while people talk."""
    asking = msgspec.structs.replace(job.interactive, label=label, seconds=_LEAD_SECONDS)
    await bench.interactive.run(asking, InteractiveMeasurement)


class BusyTarget:
    """Interactive requests while batches run back to back."""

    name = "busy"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def measure(self, job: BatchJobs) -> Figures:
        """Do one run. Raises `BenchError`."""
        await _lead_in(self._bench, job, f"{job.interactive.label}c")
        order = msgspec.structs.replace(job.batch, label=f"{job.batch.label}i", seconds=job.interactive.seconds)
        batches = asyncio.create_task(self._bench.batches.run(order, BatchMeasurement))
        asking = msgspec.structs.replace(job.interactive, label=f"{job.interactive.label}b")
        try:
            seen = await self._bench.interactive.run(asking, InteractiveMeasurement)
        finally:
            # Also if that failed: what the other one still says would be taken for the answer to its next job.
            await asyncio.wait((batches,))
        return interactive_figures(seen, batches.result())


class IdleTarget:
    """The same interactive requests on a server that does nothing else."""

    name = "idle"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def measure(self, job: BatchJobs) -> Figures:
        """Do one run. Raises `BenchError`."""
        await _lead_in(self._bench, job, f"{job.interactive.label}j")
        asking = msgspec.structs.replace(job.interactive, label=f"{job.interactive.label}i")
        return interactive_figures(await self._bench.interactive.run(asking, InteractiveMeasurement), None)

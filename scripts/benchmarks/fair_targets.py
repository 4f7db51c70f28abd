"""What `bench fair` compares: A and B alone and together, on a fair server and on one that serves as they come."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from benchmarks.children import Child
from benchmarks.fair_job import (
    A_ALONE,
    A_ALONE_FIRST_COME,
    B_ALONE,
    FAIR,
    FIRST_COME,
    FairJob,
    FairMeasurement,
    fair_figures,
)
from benchmarks.fair_load import SECOND_KEY_VARIABLE
from benchmarks.hearth import HearthServer, create_key
from benchmarks.load import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

_START_SECONDS = 900.0  # a large model is read from a slow disk
_REST_SECONDS = 2.0  # for what is left of the flood, on which its sender has hung up


class FairTarget:
    """One of the loads, on one of the servers."""

    def __init__(self, name: str, sender: Child, *, flooded: bool, asked: bool) -> None:
        self.name = name
        self._sender = sender
        self._flooded = flooded
        self._asked = asked

    async def measure(self, job: FairJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        order = msgspec.structs.replace(
            job,
            flood=job.flood if self._flooded else 0,
            every_seconds=job.every_seconds if self._asked else 0.0,
            # The targets of a server ask it one after the other: with the same prompts, the later would find them.
            label=f"{job.label}{'ab'[self._flooded]}{'ab'[self._asked]}",
        )
        seen = await self._sender.run(order, FairMeasurement)
        await asyncio.sleep(_REST_SECONDS)
        return fair_figures(seen)


@contextlib.asynccontextmanager
async def started(fair: Workplace, first_come: Workplace) -> AsyncIterator[list[FairTarget]]:
    """Start a server and a sender in both places, and end them in the end. Raises `BenchError`.

    Both models stay loaded, so that runs can take turns; only one server has work at a time.
    """
    async with contextlib.AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(_sender(place)) for place in (fair, first_come)]
        # In this order (and back), those that are compared with each other are neighbours.
        yield [
            FairTarget(B_ALONE, one, flooded=False, asked=True),
            FairTarget(FAIR, one, flooded=True, asked=True),
            FairTarget(A_ALONE, one, flooded=True, asked=False),
            FairTarget(A_ALONE_FIRST_COME, other, flooded=True, asked=False),
            FairTarget(FIRST_COME, other, flooded=True, asked=True),
        ]


@contextlib.asynccontextmanager
async def _sender(place: Workplace) -> AsyncIterator[Child]:
    server = await HearthServer.start(place, within_seconds=_START_SECONDS)
    try:
        keys = {KEY_VARIABLE: server.key, SECOND_KEY_VARIABLE: await create_key(place, "second")}
        sender = await Child.start(
            "sender",
            "benchmarks.fair_load",
            *(server.host, str(server.port)),
            environment=place.environment | keys,
            log=place.log("fair_load"),
        )
        try:
            yield sender
        finally:
            await sender.stop()
    finally:
        await server.stop()

"""What `bench many` and `bench soak` share: a server with its sender, when it rests, and the headings of the tables."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from benchmarks.chat_targets import START_SECONDS
from benchmarks.children import Child
from benchmarks.compare import say
from benchmarks.hearth import HearthServer
from benchmarks.levels import Level
from benchmarks.load import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.workplace import Workplace

ANSWERS = {
    "answered": "answered",
    "refused": "refused",
    "left": "left",
    "wrong": "wrong",
    "answered_p50_ms": "answered p50 ms",
    "answered_p99_ms": "answered p99 ms",
    "refused_p50_ms": "refused p50 ms",
    "refused_p99_ms": "refused p99 ms",
    "wall_seconds": "wall s",
}
LEVELS = {
    "api_rss_mib": "API MiB",
    "engine_rss_mib": "engine MiB",
    "api_files": "API files",
    "engine_files": "engine files",
}
_SETTLE_SECONDS = 45.0
_POLL_SECONDS = 1.0
_RESTS_POLLS = 12  # the server gives back what it does not need every 10 s


@asynccontextmanager
async def asked(place: Workplace) -> AsyncIterator[tuple[HearthServer, Child]]:
    """Start a server and the process that asks it, and end them in the end. Raises `BenchError`."""
    say("Starting the server; it loads the model.")
    server = await HearthServer.start(place, within_seconds=START_SECONDS)
    try:
        sender = await Child.start(
            "sender",
            "benchmarks.rough_load",
            *(server.host, str(server.port)),
            environment=place.environment | {KEY_VARIABLE: server.key},
            log=place.log("rough_load"),
        )
        try:
            yield server, sender
        finally:
            await sender.stop()
    finally:
        await server.stop()


async def rested(pid: int) -> Level:
    """Return the level once it has stopped falling, or after a while as it is. Raises `BenchError`."""
    lowest, since = await asyncio.to_thread(Level.of, pid), 0
    deadline = time.monotonic() + _SETTLE_SECONDS
    while since < _RESTS_POLLS and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        now = await asyncio.to_thread(Level.of, pid)
        fell = now.api_rss_bytes < lowest.api_rss_bytes or now.api_files < lowest.api_files
        since = 0 if fell else since + 1
        lowest = now if fell else lowest
    return await asyncio.to_thread(Level.of, pid)

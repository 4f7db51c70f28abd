"""What limits of requests and tokens cost the API process: the limiter by itself, and a server with a trivial route."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from benchmarks.compare import say
from benchmarks.errors import BenchError
from benchmarks.figures import milliseconds, percentile
from benchmarks.footprint import Meter
from benchmarks.http_answers import Connection
from benchmarks.keys_auth import get
from benchmarks.keys_made import AMPLE
from benchmarks.keys_server import LIMITS_PATH, NOT_TAKEN, TOKENS_TAKEN, TOKENS_USED, take
from benchmarks.workplace import TIER
from engine import load_config
from server.limits import Limiter
from server.store import ApiKey, Buckets, Database, KeyLimits, StoreError, StoreUnavailableError, sqlite_url
from server.store.api_key import utc_now

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from benchmarks.figures import Figures
    from benchmarks.hearth import HearthServer
    from benchmarks.keys_made import MadeKeys
    from benchmarks.workplace import Workplace

LIMITED, UNLIMITED = "with limits", "no limits"
_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """So many requests a second, evenly, for so long, by so many keys in turn."""

    per_second: float
    seconds: float
    keys: int


@contextmanager
def databases(place: Workplace) -> Iterator[dict[str, str]]:
    """Give the URL of an empty database of each kind that this machine has."""
    urls = {"SQLite": sqlite_url(place.folder / "limits.db")}
    parts = importlib.import_module("tests.server.postgres_parts")  # the tests know how to start one
    reason = parts.missing_reason()
    if reason is not None:
        say(f"Without PostgreSQL: {reason}.")
        yield urls
        return
    with parts.Postgres() as server:
        yield urls | {"PostgreSQL": server.new_database()}


async def limiter_in_process(place: Workplace, url: str, pace: Pace) -> dict[str, Figures]:
    """Take and give back for keys with limits and for keys without; CPU of this process, its threads included."""
    try:
        async with await Database.open(url) as database, Buckets(database) as buckets:
            limiter = Limiter(load_config(place.models), buckets)
            return {
                name: await _in_process(limiter, _keys(name, pace.keys, limits), pace)
                for name, limits in ((LIMITED, AMPLE), (UNLIMITED, KeyLimits()))
            }
    except StoreError as error:
        raise BenchError(f"A database of the benchmark's own fails: {error}") from error


async def limits_over_http(server: HearthServer, keys: MadeKeys, pace: Pace, *, first: bool) -> dict[str, Figures]:
    """Ask a route that does nothing but take and give back. `first`: keys with limits begin."""
    groups = ((LIMITED, keys.limited), (UNLIMITED, keys.unlimited))
    seen = {name: await _over_http(server, texts, pace) for name, texts in (groups if first else groups[::-1])}
    return {name: seen[name] for name in (LIMITED, UNLIMITED)}


def _keys(name: str, count: int, limits: KeyLimits) -> list[ApiKey]:
    scopes, now = frozenset({"chat"}), utc_now()
    return [ApiKey(f"{name}{number}", "bench", TIER, scopes, None, now, limits=limits) for number in range(count)]


async def _in_process(limiter: Limiter, keys: Sequence[ApiKey], pace: Pace) -> Figures:
    failed = 0

    async def one(number: int) -> None:
        nonlocal failed
        try:
            key = keys[number % len(keys)]
            taken, _ = await take(limiter, key)
        except StoreUnavailableError:  # the server lets such a request through
            failed += 1
            return
        if taken is not None:
            limiter.give_back(taken, TOKENS_TAKEN - TOKENS_USED)

    await paced(Pace(pace.per_second, 0.5, pace.keys), one)
    failed, cpu = 0, time.process_time()
    times, wall_seconds = await paced(pace, one)
    return cpu_figures(time.process_time() - cpu, wall_seconds, times, failed)


async def _over_http(server: HearthServer, texts: Sequence[str], pace: Pace) -> Figures:
    connections = [await Connection.open(server.host, server.port) for _ in range(_CONNECTIONS)]
    idle = deque(connections)
    requests = [get(LIMITS_PATH, text, server.host) for text in texts]
    failed = 0

    async def one(number: int) -> None:
        nonlocal failed
        # The one that rests longest: the server closes those that do so for seconds.
        connection = idle.popleft() if idle else await Connection.open(server.host, server.port)
        answer = await connection.ask(requests[number % len(requests)])
        if answer.status != 200:
            raise BenchError(f"A request that must succeed was answered with status {answer.status}.")
        failed += NOT_TAKEN in answer.body
        idle.append(connection)

    try:
        # Each key once: it is in the server's memory then, and so is its bucket's row.
        await paced(Pace(pace.per_second, len(texts) / pace.per_second, pace.keys), one)
        failed, meter = 0, Meter(server.pid)
        times, wall_seconds = await paced(pace, one)
        return cpu_figures(meter.stop().api_cpu_seconds, wall_seconds, times, failed)
    except psutil.Error as error:
        raise BenchError(f"A process ended while it was measured: {error}") from error
    finally:
        for connection in {*connections, *idle}:
            connection.close()


async def paced(pace: Pace, call: Callable[[int], Awaitable[None]]) -> tuple[list[float], float]:
    """Make calls at their moments, whether earlier ones have ended or not; return their seconds, and the whole."""
    times: list[float] = []
    start = time.perf_counter()

    async def one(number: int) -> None:
        began = time.perf_counter()
        await call(number)
        times.append(time.perf_counter() - began)

    try:
        async with asyncio.TaskGroup() as calls:
            for number in range(max(1, round(pace.per_second * pace.seconds))):
                await asyncio.sleep(start + number / pace.per_second - time.perf_counter())
                calls.create_task(one(number))
    except* BenchError as failed:
        raise failed.exceptions[0] from None
    return times, time.perf_counter() - start


def cpu_figures(cpu_seconds: float, wall_seconds: float, times: Sequence[float], failed: int = 0) -> Figures:
    """Put a paced run into figures; `failed` is how often the database did not answer in time."""
    return {
        "cpu_percent_of_one_core": 100 * cpu_seconds / wall_seconds,
        "cpu_ms_per_request": 1000 * cpu_seconds / len(times),
        "p50_ms": milliseconds(percentile(times, 50)),
        "p99_ms": milliseconds(percentile(times, 99)),
        "requests_per_second": len(times) / wall_seconds,
        "not_taken": failed,
    }

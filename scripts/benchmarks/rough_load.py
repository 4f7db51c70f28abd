"""The sender of `bench many` and `bench soak`, a process of its own: bursts, and clients that hang up."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from functools import partial

import uvloop

from benchmarks.children import serve_jobs
from benchmarks.http_answers import AnswerError, Connection
from benchmarks.load import KEY_VARIABLE, encode
from benchmarks.rough_job import RoughJob, RoughMeasurement

_AT_ONCE = 64  # connections that are being opened: the server's backlog is no part of what is measured
_SPARE_FILES = 100
_PAUSE_SECONDS = 0.05


async def measure(job: RoughJob, *, host: str, port: int, key: str) -> RoughMeasurement:
    """Do one run. Raises `BenchError` where the server cannot be reached at all."""
    _allow_files(job.streams + _SPARE_FILES)
    seen = RoughMeasurement()
    start = time.perf_counter()
    if job.seconds:
        until = start + job.seconds
        await asyncio.gather(*(_stream(job, one, until, seen, host, port, key) for one in range(job.streams)))
    else:
        start = await _burst(job, seen, host, port, key)
    seen.wall_seconds = time.perf_counter() - start
    return seen


async def _burst(job: RoughJob, seen: RoughMeasurement, host: str, port: int, key: str) -> float:
    requests = [encode(job.request(one, 0), 0, host=host, key=key) for one in range(job.streams)]
    connections: list[Connection] = []
    while len(connections) < job.streams:
        some = min(_AT_ONCE, job.streams - len(connections))
        connections += await asyncio.gather(*(Connection.open(host, port) for _ in range(some)))
    start = time.perf_counter()
    try:
        await asyncio.gather(*(_ask(one, each, seen) for one, each in zip(connections, requests, strict=True)))
    finally:
        for connection in connections:
            connection.close()
    return start


async def _ask(connection: Connection, request: bytes, seen: RoughMeasurement) -> None:
    try:
        seen.add(await connection.ask(request))
    except AnswerError as error:
        seen.add_wrong(str(error))


async def _stream(  # noqa: PLR0913, PLR0917  # all of one stream
    job: RoughJob, stream: int, until: float, seen: RoughMeasurement, host: str, port: int, key: str
) -> None:
    number, connection = 0, None
    while time.perf_counter() < until:
        if connection is None or not connection.usable:
            connection = await Connection.open(host, port)
        request = encode(job.request(stream, number), 0, host=host, key=key)
        refused = len(seen.refused_seconds)
        try:
            async with asyncio.timeout(job.leaves_after_seconds(stream, number)):
                await _ask(connection, request, seen)
        except TimeoutError:
            seen.left += 1
            connection.close()
            connection = None
        if len(seen.refused_seconds) > refused:
            await asyncio.sleep(_PAUSE_SECONDS)
        number += 1
    if connection is not None:
        connection.close()


def _allow_files(files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))


def main() -> None:
    """Take jobs from stdin. Arguments: host, port; the key comes in the environment, where `ps` does not show it."""
    run = partial(measure, host=sys.argv[1], port=int(sys.argv[2]), key=os.environ[KEY_VARIABLE])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(RoughJob, run))


if __name__ == "__main__":
    main()

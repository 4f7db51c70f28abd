"""The sender of batches: a process of its own that asks for whole batches, or for their good items one by one."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import msgspec
import uvloop

from benchmarks.batch_job import BatchJob, BatchMeasurement, check_batch
from benchmarks.children import serve_jobs
from benchmarks.errors import BenchError
from benchmarks.http_answers import Connection
from benchmarks.load import KEY_VARIABLE, encoded

_BATCH_PATH = "/v1/chat/completions/batch"
_SINGLE_PATH = "/v1/chat/completions"
_SHOWN_BYTES = 300


async def measure(job: BatchJob, *, host: str, port: int, key: str) -> BatchMeasurement:
    """Do one run. Raises `BenchError` when an answer is not what it has to be."""
    if job.batched:
        return await _measure_batches(job, host, port, key)
    return await _measure_singles(job, host, port, key)


async def _measure_batches(job: BatchJob, host: str, port: int, key: str) -> BatchMeasurement:
    """Send batch after batch; each is put together while the one before it is answered, so that none waits."""
    seen = BatchMeasurement()
    request = _batch_request(job, 0, host, key)
    connection = await Connection.open(host, port)
    cpu, start = time.process_time(), time.perf_counter()
    try:
        while True:
            asked = asyncio.create_task(connection.ask(request))
            await asyncio.sleep(0)  # it is written before the next one is put together
            if job.seconds:
                request = _batch_request(job, seen.batches + 1, host, key)
            answer = await asked
            seen.wall_seconds = time.perf_counter() - start
            if answer.status != 200:
                shown = answer.body[:_SHOWN_BYTES].decode(errors="replace")
                raise BenchError(f"a batch was answered with status {answer.status}. It says: {shown}")
            seen.completion_tokens += check_batch(msgspec.json.decode(answer.body), job, seen.batches)
            seen.good_items += job.items - len(job.bad_places)
            seen.batches += 1
            if seen.wall_seconds >= job.seconds:
                break
    finally:
        connection.close()
    seen.cpu_seconds = time.process_time() - cpu
    return seen


def _batch_request(job: BatchJob, number: int, host: str, key: str) -> bytes:
    return encoded(_BATCH_PATH, {"requests": job.bodies(number)}, host=host, key=key)


async def _measure_singles(job: BatchJob, host: str, port: int, key: str) -> BatchMeasurement:
    """Send all good items at once, each over a connection of its own that is open before the clock starts."""
    requests = [
        encoded(_SINGLE_PATH, body, host=host, key=key)
        for place, body in enumerate(job.bodies())
        if place not in job.bad_places
    ]
    connections = [await Connection.open(host, port) for _ in requests]
    try:
        cpu, start = time.process_time(), time.perf_counter()
        answers = await asyncio.gather(*map(Connection.ask, connections, requests))
        wall_seconds = time.perf_counter() - start
        tokens = sum(answer.completion_tokens() for answer in answers)
    finally:
        for connection in connections:
            connection.close()
    return BatchMeasurement(wall_seconds, time.process_time() - cpu, len(requests), tokens)


def main() -> None:
    """Take jobs from stdin. Arguments: host, port; the key comes in the environment, where `ps` does not show it."""
    run = partial(measure, host=sys.argv[1], port=int(sys.argv[2]), key=os.environ[KEY_VARIABLE])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(BatchJob, run))


if __name__ == "__main__":
    main()

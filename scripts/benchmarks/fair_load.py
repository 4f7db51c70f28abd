"""The sender of both keys, a process of its own: A's flood in a closed loop, B's requests in an open one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING

import uvloop

from benchmarks.children import serve_jobs
from benchmarks.fair_job import FairJob, FairMeasurement
from benchmarks.http_answers import Answer, AnswerError, Connection
from benchmarks.load import KEY_VARIABLE, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECOND_KEY_VARIABLE = "BENCH_SECOND_API_KEY"
_CONNECT_SECONDS = 0.2


class Address:
    """Where to ask, and as whom: `key` belongs to A, `second_key` to B."""

    def __init__(self, host: str, port: int, key: str, second_key: str) -> None:
        self.host = host
        self.port = port
        self.key = key
        self.second_key = second_key

    async def connect(self) -> Connection:
        """Open a connection."""
        return await Connection.open(self.host, self.port)


async def measure(job: FairJob, *, address: Address) -> FairMeasurement:
    """Do one run. Raises `BenchError` when a single answer is no success: such a run says nothing."""
    seen = FairMeasurement()
    async with _flooded(job, address, seen):
        await asyncio.sleep(job.lead_seconds)
        # What came before is no part of it: the flood had to fill the queue first.
        seen.flood_requests = seen.flood_tokens = 0
        seen.flood_gaps_seconds.clear()
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as asked:
                for index, moment in enumerate(job.moments()):
                    asked.create_task(_ask(job, index, start + moment, address, seen))
                asked.create_task(asyncio.sleep(job.seconds))
        except* AnswerError as failed:
            raise failed.exceptions[0] from None
        seen.wall_seconds = time.perf_counter() - start
    return seen


@contextlib.asynccontextmanager
async def _flooded(job: FairJob, address: Address, seen: FairMeasurement) -> AsyncIterator[None]:
    """Keep A's requests in flight meanwhile, then hang up on what is left of them.

    Raises `AnswerError` at the end if an answer was no success.
    """
    numbers = count()

    async def stream() -> None:
        connection = await address.connect()
        try:
            for index in numbers:
                request = encode(job.requests_of("a"), index, host=address.host, key=address.key)
                if not connection.usable:
                    connection = await address.connect()
                answer = await connection.ask(request)
                tokens = answer.completion_tokens()
                seen.flood_requests += 1
                seen.flood_tokens += tokens
                seen.flood_gaps_seconds += [after - before for before, after in pairwise(answer.text_times)]
        finally:
            connection.close()

    streams = [asyncio.create_task(stream()) for _ in range(job.flood)]
    try:
        yield
        for ended in filter(asyncio.Task.done, streams):  # none does unless it failed
            ended.result()
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _ask(job: FairJob, index: int, moment: float, address: Address, seen: FairMeasurement) -> None:
    request = encode(job.requests_of("b"), index, host=address.host, key=address.second_key)
    # Open when the moment comes, but not for so long that the server closes what rests.
    await asyncio.sleep(moment - _CONNECT_SECONDS - time.perf_counter())
    connection = await address.connect()
    try:
        await asyncio.sleep(moment - time.perf_counter())
        answer: Answer = await connection.ask(request)
    finally:
        connection.close()
    answer.completion_tokens()
    if not answer.text_times:
        raise AnswerError("an answer held no text. Another model may have some to say.")
    seen.time_to_first_token_seconds.append(answer.text_times[0] - answer.started)
    seen.latency_seconds.append(answer.finished - answer.started)
    seen.late_seconds.append(answer.started - moment)


def main() -> None:
    """Take jobs from stdin. Arguments: host, port; the keys come in the environment, where `ps` shows none."""
    keys = (os.environ[name] for name in (KEY_VARIABLE, SECOND_KEY_VARIABLE))
    run = partial(measure, address=Address(sys.argv[1], int(sys.argv[2]), *keys))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(FairJob, run))


if __name__ == "__main__":
    main()

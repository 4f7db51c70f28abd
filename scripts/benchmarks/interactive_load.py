"""The sender of interactive requests: a process of its own, in an open loop, so that a slow server gets no pause."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import uvloop

from benchmarks.batch_job import InteractiveJob, InteractiveMeasurement
from benchmarks.children import serve_jobs
from benchmarks.http_answers import Answer, AnswerError, Connection
from benchmarks.load import KEY_VARIABLE, encoded

_FIRST_CONNECTIONS = 8


async def measure(job: InteractiveJob, *, host: str, port: int, key: str) -> InteractiveMeasurement:
    """Do one run. Raises `BenchError` when a single answer is no success: such a run says nothing."""
    fields = [job.fields(index) for index in range(len(job.moments()))]
    requests = [encoded("/v1/chat/completions", body, host=host, key=key) for body in fields]
    idle = [await Connection.open(host, port) for _ in range(_FIRST_CONNECTIONS)]
    seen = InteractiveMeasurement()
    start = time.perf_counter()

    async def one(moment: float, request: bytes) -> None:
        await asyncio.sleep(start + moment - time.perf_counter())
        while idle and not idle[-1].usable:  # the server closes what rests for long
            idle.pop()
        connection = idle.pop() if idle else await Connection.open(host, port)
        try:
            answer = await connection.ask(request)
            _check(answer)
        except BaseException:
            connection.close()
            raise
        seen.time_to_first_token_seconds.append(answer.text_times[0] - answer.started)
        seen.latency_seconds.append(answer.finished - answer.started)
        seen.late_seconds.append(answer.started - start - moment)
        if connection.usable:
            idle.append(connection)

    try:
        async with asyncio.TaskGroup() as all_of_them:
            for moment, request in zip(job.moments(), requests, strict=True):
                all_of_them.create_task(one(moment, request))
    except* AnswerError as failed:
        raise failed.exceptions[0] from None
    finally:
        for connection in idle:
            connection.close()
    return seen


def _check(answer: Answer) -> None:
    answer.completion_tokens()
    if not answer.text_times:
        raise AnswerError("an answer to an interactive request held no text. Another model may have some to say.")


def main() -> None:
    """Take jobs from stdin. Arguments: host, port; the key comes in the environment, where `ps` does not show it."""
    run = partial(measure, host=sys.argv[1], port=int(sys.argv[2]), key=os.environ[KEY_VARIABLE])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(InteractiveJob, run))


if __name__ == "__main__":
    main()

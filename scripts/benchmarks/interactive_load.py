"""The sender of interactive requests: a process of its own, in an open loop, so that a slow server gets no pause."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

import uvloop

from benchmarks.batch_job import InteractiveJob, InteractiveMeasurement
from benchmarks.children import serve_jobs
from benchmarks.http_answers import Answer, AnswerError
from benchmarks.load import KEY_VARIABLE, encoded
from benchmarks.open_loop import Pool, at_moments

_FIRST_CONNECTIONS = 8


async def measure(job: InteractiveJob, *, host: str, port: int, key: str) -> InteractiveMeasurement:
    """Do one run. Raises `BenchError` when a single answer is no success: such a run says nothing."""
    fields = [job.fields(index) for index in range(len(job.moments()))]
    requests = [encoded("/v1/chat/completions", body, host=host, key=key) for body in fields]
    pool = await Pool.open(host, port, _FIRST_CONNECTIONS)
    seen = InteractiveMeasurement()

    async def one(number: int, moment: float) -> None:
        async with pool.connection() as connection:
            answer = await connection.ask(requests[number])
            _check(answer)
        seen.time_to_first_token_seconds.append(answer.text_times[0] - answer.started)
        seen.latency_seconds.append(answer.finished - answer.started)
        seen.late_seconds.append(answer.started - moment)

    try:
        await at_moments(job.moments(), one)
    finally:
        pool.close()
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

"""The load generator: a process of its own that sends chat requests over HTTP, in a closed or an open loop."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from typing import Any

import msgspec
import uvloop

from benchmarks.chat_job import ChatJob, Measurement
from benchmarks.children import serve_jobs
from benchmarks.http_answers import Answer, AnswerError
from benchmarks.open_loop import Pool, at_moments

KEY_VARIABLE = "BENCH_API_KEY"
_FIRST_CONNECTIONS = 32


async def measure(job: ChatJob, *, host: str, port: int, key: str) -> Measurement:
    """Do one run. Raises `BenchError` when a single answer is no success: such a run says nothing.

    Of a stream that is found out at the end of the run, but for its status.
    """
    requests = [encode(job, index, host=host, key=key) for index in range(job.requests)]
    pool = await Pool.open(host, port, job.streams or _FIRST_CONNECTIONS)
    answers: list[tuple[float, Answer]] = []  # with the moment for which each was asked; looked at once all are here
    cpu, start = time.process_time(), time.perf_counter()
    try:
        await (_open_loop(job, requests, pool, answers) if job.rate else _closed_loop(job, requests, pool, answers))
    except AnswerError:
        for _, answer in answers:
            answer.completion_tokens()  # the first to fail says why, not those that found its connection closed
        raise
    finally:
        pool.close()
    seen = Measurement(wall_seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu)
    for moment, answer in answers:
        if job.rate:
            seen.late_seconds.append(answer.started - moment)
        seen.add(moment, answer.text_times, answer.finished, answer.completion_tokens())
    return seen


async def _closed_loop(job: ChatJob, requests: list[bytes], pool: Pool, answers: list[tuple[float, Answer]]) -> None:
    left = iter(requests)

    async def stream() -> None:
        for request in left:
            async with pool.connection() as connection:
                answer = await connection.ask(request)
                answers.append((answer.started, answer))
                answer.check_status()

    streams = [asyncio.create_task(stream()) for _ in range(job.streams)]
    try:
        await asyncio.gather(*streams)
    finally:
        for one in streams:
            one.cancel()


async def _open_loop(job: ChatJob, requests: list[bytes], pool: Pool, answers: list[tuple[float, Answer]]) -> None:
    async def send(number: int, moment: float) -> None:
        async with pool.connection() as connection:
            answer = await connection.ask(requests[number])
            answers.append((moment, answer))
            answer.check_status()

    await at_moments(job.moments(), send)


def encode(job: ChatJob, index: int, *, host: str, key: str) -> bytes:
    """Return the whole HTTP request, ready to be written."""
    fields: dict[str, Any] = {
        "model": job.model,
        "messages": job.messages(index),
        "temperature": 0,
        "max_tokens": job.max_tokens,
        "ignore_eos": True,
        "stream": job.streamed,
    }
    if job.streamed:
        fields["stream_options"] = {"include_usage": True}
    return encoded("/v1/chat/completions", fields, host=host, key=key)


def encoded(path: str, fields: dict[str, Any], *, host: str, key: str) -> bytes:
    """Return a POST of `fields`, ready to be written."""
    body = msgspec.json.encode(fields)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main() -> None:
    """Take jobs from stdin. Arguments: host, port; the key comes in the environment, where `ps` does not show it."""
    run = partial(measure, host=sys.argv[1], port=int(sys.argv[2]), key=os.environ[KEY_VARIABLE])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(ChatJob, run))


if __name__ == "__main__":
    main()

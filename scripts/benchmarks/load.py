"""The load generator: a process of its own that sends chat requests over HTTP, in a closed loop, and times answers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from benchmarks.chat_job import ChatJob, Measurement
from benchmarks.children import serve_jobs
from benchmarks.http_answers import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY_VARIABLE = "BENCH_API_KEY"


async def measure(job: ChatJob, *, host: str, port: int, key: str) -> Measurement:
    """Do one run. Raises `BenchError` when a single answer is no success: such a run says nothing."""
    requests = iter([encode(job, index, host=host, key=key) for index in range(job.requests)])
    connections = [await Connection.open(host, port) for _ in range(job.streams)]
    seen = Measurement()
    cpu, start = time.process_time(), time.perf_counter()
    streams = [asyncio.create_task(_stream(connection, requests, seen, host, port)) for connection in connections]
    try:
        await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
    seen.wall_seconds, seen.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return seen


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


async def _stream(connection: Connection, requests: Iterator[bytes], seen: Measurement, host: str, port: int) -> None:
    try:
        for request in requests:
            if not connection.usable:
                connection = await Connection.open(host, port)
            answer = await connection.ask(request)
            seen.add(answer.started, answer.text_times, answer.finished, answer.completion_tokens())
    finally:
        connection.close()


def main() -> None:
    """Take jobs from stdin. Arguments: host, port; the key comes in the environment, where `ps` does not show it."""
    run = partial(measure, host=sys.argv[1], port=int(sys.argv[2]), key=os.environ[KEY_VARIABLE])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(ChatJob, run))


if __name__ == "__main__":
    main()

"""A client that asks and leaves, on any route, and what the access log says about it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import psutil
from chat_parts import assert_well
from serving import Key, Server, async_poll_until, open_socket, poll_until, raw_request

if TYPE_CHECKING:
    import httpx2


WITHIN_SECONDS = 1  # of its client's leaving a request has ended (docs/api.md)


async def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """The access line of a request that has ended or is about to."""
    lines: list[dict[str, Any]] = []

    def logged() -> bool:
        lines[:] = [line for line in server.access_lines() if line["request_id"] == request_id]
        return bool(lines)

    await async_poll_until(logged, 60)
    return lines[0]


async def gone_line(server: Server, request_id: str, left_at: float) -> dict[str, Any]:
    """The access line of a request whose client left then (`time.time`): it has ended in time, by the server's clock."""
    line = await line_of(server, request_id)
    assert line["status"] == 499
    assert line["time"] - left_at < WITHIN_SECONDS
    return line


async def ask_and_leave(
    server: Server, key: Key, http: httpx2.AsyncClient, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Leave once the answer is being made: after the first bytes of a stream, or another's whole answer."""
    request_id = f"left{path.replace('/', '-')}-{body['stream']}"
    headers = {
        "Authorization": f"Bearer {key.text}",
        "Content-Type": "application/json",
        "X-Request-Id": request_id,
    }
    opened = open_socket(server)
    opened.sendall(raw_request("POST", path, headers, json.dumps(body).encode()))
    if body["stream"]:
        assert (await asyncio.to_thread(opened.recv, 10_000)).startswith(b"HTTP/1.1 200 ")
    else:
        await assert_well(http)
    left_at = time.time()
    opened.close()
    return await gone_line(server, request_id, left_at)


def engines_cpu_percent(server: Server) -> float:
    """How busy the server's child processes, the engines, are just now; 100 is one core."""
    children = psutil.Process(server.pid).children(recursive=True)
    before, started = sum(map(_cpu_seconds, children)), time.monotonic()
    psutil.Process(server.pid).cpu_percent(interval=0.2)
    return 100 * (sum(map(_cpu_seconds, children)) - before) / (time.monotonic() - started)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def until_engines_rest(server: Server) -> None:
    """Freed slots cost nothing: the engines become idle, long before they would have answered what was left."""
    await asyncio.to_thread(poll_until, lambda: engines_cpu_percent(server) < 20, 5)

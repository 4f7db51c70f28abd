"""Clients that leave: their work stops within a second, in every phase, and the log says so."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, PROMPTS, body
from leaving_parts import engines_cpu_percent, gone_line, line_of, until_engines_rest
from serving import Key, Server, open_socket, poll_until, raw_request

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

# Runs for half a minute if nobody stops it.
LONG = {"model": MODEL, "messages": HELLO, "temperature": 0, "n": 8, "max_tokens": 8000, "ignore_eos": True}


def send(server: Server, key: Key, request_id: str, request: dict[str, Any], *, cut: int = 0) -> socket.socket:
    """Send a chat request by hand, without the last `cut` bytes of its body."""
    headers = {
        "Authorization": f"Bearer {key.text}",
        "Content-Type": "application/json",
        "X-Request-Id": request_id,
    }
    data = raw_request("POST", CHAT, headers, json.dumps(request).encode())
    opened = open_socket(server)
    opened.sendall(data[: len(data) - cut])
    return opened


async def answered(http: httpx2.AsyncClient) -> None:
    """A short request from begin to end: what was sent before it has reached the engine by then."""
    answer = (await http.post(CHAT, json=body(PROMPTS["say-hello"]))).json()
    assert answer["choices"][0]["message"]["content"] == HELLO_ANSWER


async def test_a_plain_request_stops_when_its_client_leaves(server: Server, admin_key: Key, http: httpx2.AsyncClient):
    opened = send(server, admin_key, "left-plain", LONG)
    await answered(http)
    await asyncio.to_thread(poll_until, lambda: engines_cpu_percent(server) > 30, 30)
    left_at = time.time()
    opened.close()
    line = await gone_line(server, "left-plain", left_at)
    assert line.get("completion_tokens") is None
    await until_engines_rest(server)


async def test_a_stream_stops_when_its_client_leaves(server: Server, admin_key: Key, http: httpx2.AsyncClient):
    opened = send(server, admin_key, "left-stream", LONG | {"stream": True})
    received = await asyncio.to_thread(opened.recv, 10_000)
    assert received.startswith(b"HTTP/1.1 200 ")
    left_at = time.time()
    opened.close()
    line = await gone_line(server, "left-stream", left_at)
    assert 0 < line["completion_tokens"] < 8 * 8000 / 2
    assert line["stream"] is True
    await until_engines_rest(server)
    await answered(http)


async def test_a_stream_stops_when_its_client_vanishes_without_goodbye(server: Server, admin_key: Key):
    opened = send(server, admin_key, "left-reset", LONG | {"stream": True})
    await asyncio.to_thread(opened.recv, 10_000)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    left_at = time.time()
    opened.close()
    await gone_line(server, "left-reset", left_at)
    await until_engines_rest(server)


async def test_many_clients_that_leave_at_once_leave_nothing_behind(
    server: Server, admin_key: Key, http: httpx2.AsyncClient
):
    names = [f"many-{number}" for number in range(24)]
    many = [send(server, admin_key, name, LONG | {"n": 1, "stream": bool(i % 2)}) for i, name in enumerate(names)]
    await answered(http)
    for opened in many:
        opened.close()
    left_at = time.time()
    for name in names:
        await gone_line(server, name, left_at)
    await until_engines_rest(server)


async def test_a_client_that_leaves_before_its_body_is_complete_starts_nothing(
    server: Server, admin_key: Key, http: httpx2.AsyncClient
):
    opened = send(server, admin_key, "left-early", LONG, cut=10)
    await answered(http)
    left_at = time.time()
    opened.close()
    line = await gone_line(server, "left-early", left_at)
    assert "model" not in line
    await until_engines_rest(server)
    await answered(http)


async def test_the_access_line_of_an_answer_says_what_happened(server: Server, http: httpx2.AsyncClient):
    for stream in (False, True):
        name = f"logged-{stream}"
        response = await http.post(CHAT, json=body(PROMPTS["say-hello"], stream=stream), headers={"X-Request-Id": name})
        assert response.status_code == 200
        line = await line_of(server, name)
        assert (line["status"], line["route"], line["method"], line["model"]) == (200, CHAT, "POST", MODEL)
        assert (line["finish_reason"], bool(line["stream"])) == ("stop", stream)
        assert server.admin_key is not None
        assert line["key"] == server.admin_key.public_id
        assert min(line["prompt_tokens"], line["completion_tokens"]) > 0
        assert "Say hello" not in str(line)

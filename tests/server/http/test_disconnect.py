"""Clients that leave: their work stops within a second, in every phase, and the log says so."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, PROMPTS, body
from leaving_parts import engines_cpu_percent, until_engines_rest
from serving import Key, Server, async_poll_until, open_socket, raw_request

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

# Runs for many seconds if nobody stops it.
LONG = {"model": MODEL, "messages": HELLO, "temperature": 0, "n": 8, "max_tokens": 1500, "ignore_eos": True}


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


def line_of(server: Server, request_id: str) -> dict[str, Any] | None:
    return next((line for line in server.access_lines() if line["request_id"] == request_id), None)


async def gone_line(server: Server, request_id: str) -> dict[str, Any]:
    """The access line, which has to come within a second."""
    await async_poll_until(lambda: line_of(server, request_id) is not None, 1)
    line = line_of(server, request_id)
    assert line is not None
    assert line["status"] == 499
    return line


async def answered(http: httpx2.AsyncClient) -> None:
    """A short request from begin to end: what was sent before it has reached the engine by then."""
    answer = (await http.post(CHAT, json=body(PROMPTS["say-hello"]))).json()
    assert answer["choices"][0]["message"]["content"] == HELLO_ANSWER


async def test_a_plain_request_stops_when_its_client_leaves(server: Server, admin_key: Key, http: httpx2.AsyncClient):
    opened = send(server, admin_key, "left-plain", LONG)
    await answered(http)
    assert engines_cpu_percent(server) > 30
    assert line_of(server, "left-plain") is None
    opened.close()
    line = await gone_line(server, "left-plain")
    assert line.get("completion_tokens") is None
    await until_engines_rest(server)


async def test_a_stream_stops_when_its_client_leaves(server: Server, admin_key: Key, http: httpx2.AsyncClient):
    opened = send(server, admin_key, "left-stream", LONG | {"stream": True})
    received = await asyncio.to_thread(opened.recv, 10_000)
    assert received.startswith(b"HTTP/1.1 200 ")
    opened.close()
    line = await gone_line(server, "left-stream")
    assert 0 < line["completion_tokens"] < 8 * 1500 / 2
    assert line["stream"] is True
    await until_engines_rest(server)
    await answered(http)


async def test_a_stream_stops_when_its_client_vanishes_without_goodbye(server: Server, admin_key: Key):
    opened = send(server, admin_key, "left-reset", LONG | {"stream": True})
    await asyncio.to_thread(opened.recv, 10_000)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    opened.close()
    await gone_line(server, "left-reset")
    await until_engines_rest(server)


async def test_many_clients_that_leave_at_once_leave_nothing_behind(
    server: Server, admin_key: Key, http: httpx2.AsyncClient
):
    names = [f"many-{number}" for number in range(24)]
    many = [send(server, admin_key, name, LONG | {"n": 1, "stream": bool(i % 2)}) for i, name in enumerate(names)]
    await answered(http)
    for opened in many:
        opened.close()
    for name in names:
        await gone_line(server, name)
    await until_engines_rest(server)


async def test_a_client_that_leaves_before_its_body_is_complete_starts_nothing(
    server: Server, admin_key: Key, http: httpx2.AsyncClient
):
    opened = send(server, admin_key, "left-early", LONG, cut=10)
    await answered(http)
    opened.close()
    line = await gone_line(server, "left-early")
    assert "model" not in line
    await until_engines_rest(server)
    await answered(http)


async def test_the_access_line_of_an_answer_says_what_happened(server: Server, http: httpx2.AsyncClient):
    for stream in (False, True):
        name = f"logged-{stream}"
        response = await http.post(CHAT, json=body(PROMPTS["say-hello"], stream=stream), headers={"X-Request-Id": name})
        assert response.status_code == 200
        await async_poll_until(lambda name=name: line_of(server, name) is not None, 1)
        line = line_of(server, name)
        assert (line["status"], line["route"], line["method"], line["model"]) == (200, CHAT, "POST", MODEL)
        assert (line["finish_reason"], bool(line["stream"])) == ("stop", stream)
        assert server.admin_key is not None
        assert line["key"] == server.admin_key.public_id
        assert min(line["prompt_tokens"], line["completion_tokens"]) > 0
        assert "Say hello" not in str(line)

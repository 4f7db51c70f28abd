"""What request bodies may take together, and how long each may take to come."""

import asyncio
from typing import Any

import pytest
from connection_parts import Connection, ask
from starlette.requests import Request

from server.errors import ApiError
from server.http.routing import Bodies, read_capped

MIB = 2**20


def test_a_key_with_its_share_is_refused_and_another_one_is_not():
    bodies = Bodies(10 * MIB)
    with bodies.held_for("many") as many:
        for _ in range(10):
            many(MIB)
        with pytest.raises(ApiError) as refused:
            many(1)
        assert (refused.value.status, refused.value.code) == (503, "server_overloaded")
        assert refused.value.headers["Retry-After"]
        with bodies.held_for("one") as one:
            one(4 * MIB)
            with pytest.raises(ApiError):
                one(2 * MIB)
    with bodies.held_for("many") as many:  # all of it was given back
        many(10 * MIB)


async def test_a_body_that_drips_has_an_end():
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(ApiError) as refused:
        await read_capped(Request({"type": "http"}, receive), MIB, lambda _: None, seconds=0.2)
    assert (refused.value.status, refused.value.code) == (408, "request_timeout")


async def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_its_connection():
    connection = Connection()
    connection.gate.set()
    connection.protocol.data_received(ask("/events").replace(b"HTTP/1.1", b"HTTP/1.0"))
    await connection.ended()
    head, _, body = b"".join(connection.writes).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"onetwothree"
    assert connection.transport.is_closing()

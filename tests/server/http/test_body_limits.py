"""What request bodies may take together, and how long each may take to come."""

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from connection_parts import Connection, ask
from fastapi import APIRouter, FastAPI
from serving import async_poll_until
from starlette.requests import Request

from server.errors import ApiError, install
from server.http import protocol
from server.http.bodies import Bodies, StrictRoute, parse_form, read_body
from server.http.disconnect import Drain
from server.http.streaming import StreamedResponse
from server.observability.access_log import RequestRecord
from server.settings import load_settings

MIB = 2**20


def scope_with(drain: Drain) -> dict[str, Any]:
    state = SimpleNamespace(drain=drain, settings=SimpleNamespace(max_body_bytes=MIB))
    return {"type": "http", "headers": [], "app": SimpleNamespace(state=state)}


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


def test_who_has_given_everything_back_takes_no_share_of_others():
    bodies = Bodies(100)
    with ExitStack() as stack:
        for number in range(20):
            add = stack.enter_context(bodies.held_for(f"idle {number}"))
            add(1)
            add(-1)
        stack.enter_context(bodies.held_for("large"))(95)
        stack.enter_context(bodies.held_for("small"))(6)


async def test_a_body_that_drips_has_an_end():
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(ApiError) as refused:
        await read_body(Request(scope_with(Drain()), receive), lambda _: None, seconds=0.2)
    assert (refused.value.status, refused.value.code) == (408, "request_timeout")


async def test_a_body_that_is_still_coming_when_the_server_ends_gets_503():
    drain, waits = Drain(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        waits.set()
        await asyncio.Event().wait()
        return {}

    reading = asyncio.create_task(read_body(Request(scope_with(drain), receive), lambda _: None))
    await waits.wait()
    drain.cut()
    reading.cancel()  # as uvicorn does
    with pytest.raises(ApiError) as refused:
        await reading
    assert (refused.value.status, refused.value.code) == (503, "server_overloaded")
    assert refused.value.headers["Retry-After"]


def test_a_form_full_of_its_own_boundary_is_refused_before_it_is_parsed():
    part = b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    ends_nowhere = b"\r\n--B?"
    assert parse_form(part + ends_nowhere * 60 + b"\r\n--B--\r\n", b"B") == [("file", ends_nowhere * 60)]
    with pytest.raises(ApiError) as refused:
        parse_form(part + ends_nowhere * 100_000 + b"\r\n--B--\r\n", b"B")
    assert refused.value.status == 400


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


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("content-length", str(25 * MIB + 1), 413),
        ("content-length", str(2**40), 413),
        ("content-encoding", "gzip", 415),
        ("transfer-encoding", "gzip, chunked", 415),
        ("transfer-encoding", "gzip", 415),
    ],
)
async def test_a_body_that_its_head_rules_out_is_refused_before_it_is_read(header: str, value: str, status: int):
    router = APIRouter(route_class=StrictRoute)

    @router.post("/")
    async def route(body: dict[str, Any]) -> None:
        raise AssertionError(body)

    async def receive() -> dict[str, Any]:
        raise AssertionError("it was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    sent: list[dict[str, Any]] = []
    app = FastAPI(routes=router.routes)
    install(app)
    app.state.settings, app.state.bodies, app.state.drain = load_settings(), Bodies(2**30), Drain()
    record = RequestRecord("req_1", "POST", None)
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "state": {"record": record}}
    await app({**scope, "headers": [(header.encode(), value.encode())]}, receive, send)
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]) == (status, record.error_code)
    assert record.error_code == {413: "request_too_large", 415: "unsupported_media_type"}[status]


async def test_two_large_bodies_are_parsed_at_a_time_and_small_ones_do_not_wait():
    router = APIRouter(route_class=StrictRoute)

    @router.post("/")
    async def route(body: dict[str, Any]) -> int:
        return len(body["a"])

    async def ask_with(size: int) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"a": "x" * size}).encode()}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        sent: list[dict[str, Any]] = []
        state = {"record": RequestRecord("req_1", "POST", None)}
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "state": state}
        await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
        assert (sent[0]["status"], json.loads(sent[1]["body"])) == (200, size)

    app = FastAPI(routes=router.routes)
    install(app)
    app.state.settings, app.state.bodies, app.state.drain = load_settings(), Bodies(2**30), Drain()
    parsing = app.state.bodies.parsing
    for _ in range(2):
        assert not parsing.locked()
        await parsing.acquire()
    large = asyncio.create_task(ask_with(MIB))
    for _ in range(3):
        await ask_with(1000)
    assert not large.done()
    parsing.release()
    await asyncio.wait_for(large, 60)


class Behind(protocol.Connection):
    """A client's connection that somebody else holds."""

    def __init__(self) -> None: ...

    def can_write(self) -> bool:
        return False

    def last_comes(self, size: int) -> None: ...

    def watch(self, on_disconnect: Callable[[], None] | None) -> None: ...


async def test_the_body_of_a_streamed_answer_counts_until_it_has_begun():
    router, first, rest = APIRouter(route_class=StrictRoute), asyncio.Event(), asyncio.Event()
    waits: list[weakref.ref[Request]] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        await first.wait()
        yield b"one"
        await rest.wait()

    @router.post("/")
    async def route(body: dict[str, Any], request: Request) -> StreamedResponse:
        assert body["a"]
        waits.append(weakref.ref(request))
        return StreamedResponse(pieces())

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"a": "x" * MIB}).encode()}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app, sent = FastAPI(routes=router.routes), list[dict[str, Any]]()
    install(app)
    app.state.settings, app.state.bodies, app.state.drain = load_settings(), Bodies(2**30), Drain()
    state = {"record": RequestRecord("req_1", "POST", None)}
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "query_string": b"", "state": state}
    headers = [(b"content-type", b"application/json")]
    asked = asyncio.create_task(app({**scope, "headers": headers, "hearth.connection": Behind()}, receive, send))
    held = app.state.bodies._bytes
    await async_poll_until(lambda: bool(waits), 60)
    assert held.total() > MIB, "it waits for its turn"
    first.set()
    await async_poll_until(lambda: len(sent) >= 2, 60)
    assert held.total() == 0
    request = waits[0]()
    assert request is not None
    assert (request._body, request._json) == (b"", None)
    rest.set()
    await asyncio.wait_for(asked, 60)
    assert not held


@pytest.mark.parametrize(
    ("given", "kept"), [("mine-7_X", True), ("hk_abcdefghijkl_0123456789", False), ("x-hk_", False), ("h_k", True)]
)
async def test_a_key_in_the_place_of_a_request_id_is_replaced(given: str, *, kept: bool):
    connection = Connection()
    connection.gate.set()
    connection.protocol.data_received(
        ask("/plain").replace(b"\r\n\r\n", b"\r\nX-Request-Id: " + given.encode() + b"\r\n\r\n")
    )
    await async_poll_until(lambda: bool(connection.log), 60)
    assert (connection.log[0].request_id == given) == kept
    assert (given.encode() in b"".join(connection.writes)) == kept

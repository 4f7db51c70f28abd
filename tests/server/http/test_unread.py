"""Clients that stop reading: they hold nothing for ever, and those that are only slow get everything."""

import asyncio
import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Self

import pytest
import uvicorn
import uvloop
from serving import poll_until, raw_request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tls_pair import Pair, make_pair

from server.http.disconnect import Drain
from server.http.middleware import RequestContext
from server.http.protocol import HearthProtocol
from server.http.streaming import StreamedResponse
from server.observability.metrics import Metrics
from server.observability.status_server import Lately
from server.settings import load_settings

STALL_SECONDS = 0.4
IDLE_SECONDS = 1
PIECE = b"data: " + b"x" * 8_000 + b"\n\n"
LARGE_BYTES = 24 * 2**20  # more than the kernel's buffers of both sides hold


class Streaming:
    """The server's own HTTP below three answers without end or of great size, on a real port, with uvloop."""

    def __init__(self, pair: Pair | None = None) -> None:
        self._pair = pair
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.closed: list[str] = []  # whose generator has ended
        routes = [
            Route(f"/{name}", getattr(self, f"_{name}"), methods=["POST"]) for name in ("events", "file", "whole")
        ]
        self._app = Starlette(routes=routes, middleware=[Middleware(RequestContext)], lifespan=self._lifespan)
        self._app.state.settings = load_settings(write_stall_seconds=STALL_SECONDS)
        self._app.state.metrics = self.metrics = Metrics(())
        self._app.state.access_log, self._app.state.tracing = [], None
        self._app.state.lately = Lately(self.metrics)
        config = uvicorn.Config(
            self._app,
            http=HearthProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self.uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        if self._pair is not None:
            self.uvicorn.config.load()
            self.uvicorn.config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.uvicorn.config.ssl.load_cert_chain(self._pair.cert, self._pair.key)
        uvloop.run(self.uvicorn.serve(sockets=[self._listener]))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        app.state.drain = Drain()
        yield

    def __enter__(self) -> Self:
        self._thread.start()
        poll_until(lambda: self.uvicorn.started, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self.uvicorn.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _pieces(self, name: str) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield PIECE
                await asyncio.sleep(0)
        finally:
            self.closed.append(name)

    async def _events(self, request: Request) -> Response:
        await request.body()
        return StreamedResponse(self._pieces("events"), keep_alive_seconds=5)

    async def _file(self, request: Request) -> Response:
        await request.body()
        return StreamedResponse(self._pieces("file"), media_type="audio/wav", failure=None)

    async def _whole(self, request: Request) -> Response:
        await request.body()
        return Response(bytes(LARGE_BYTES))

    def ask(self, path: str, *, times: int = 1, buffer_bytes: int | None = None) -> socket.socket:
        """Send a request, and read nothing but the answer's first bytes."""
        opened = socket.socket()
        opened.settimeout(60)
        if buffer_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        opened.connect(self._listener.getsockname())
        if self._pair is not None:
            opened = self._pair.client_context().wrap_socket(opened, server_hostname="localhost")
        opened.sendall(raw_request("POST", path, {}, b"{}") * times)
        assert opened.recv(16).startswith(b"HTTP/1.1 200 ")
        return opened

    def left(self) -> float:
        """How many requests were recorded as 499."""
        labels = {"method": "POST", "status": "499", "model": ""}
        routes = ("", "/events", "/file", "/whole")
        values = [
            self.metrics.registry.get_sample_value("hearth_requests_total", {**labels, "route": r}) for r in routes
        ]
        return sum(value or 0 for value in values)


@pytest.fixture(scope="module", params=["http", "https"])
def streaming(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streaming]:
    pair = make_pair(tmp_path_factory.mktemp("tls")) if request.param == "https" else None
    with Streaming(pair) as running:
        yield running


@pytest.mark.parametrize("name", ["events", "file"])
def test_a_stream_that_nobody_reads_is_given_up_on_and_recorded_as_left(streaming: Streaming, name: str):
    before = streaming.left()
    with streaming.ask(f"/{name}"):
        poll_until(lambda: name in streaming.closed, 60)
        poll_until(lambda: streaming.left() == before + 1, 60)
        poll_until(lambda: not streaming.uvicorn.server_state.connections, 60)


def test_a_whole_answer_that_nobody_reads_is_not_kept_in_memory_for_ever(streaming: Streaming):
    with streaming.ask("/whole"):
        # TLS hands all of it to the kernel's side at once, where it is looked for when the connection would be idle
        poll_until(lambda: not streaming.uvicorn.server_state.connections, 60)


def test_answers_that_wait_behind_one_that_nobody_reads_go_with_it(streaming: Streaming):
    with streaming.ask("/whole", times=3):
        poll_until(lambda: not streaming.uvicorn.server_state.tasks, 60)
        poll_until(lambda: not streaming.uvicorn.server_state.connections, 60)


def test_a_client_with_a_small_buffer_that_goes_on_reading_is_not_cut_off(streaming: Streaming):
    """Three times as long as one that takes nothing is given."""
    before, taken = streaming.left(), 0
    with streaming.ask("/events", buffer_bytes=8192) as opened:
        ends = time.monotonic() + 3 * STALL_SECONDS
        while time.monotonic() < ends:
            data = opened.recv(1024)
            assert data
            taken += len(data)
            select.select([], [], [], 0.02)
        assert streaming.left() == before
    assert taken > 3 * 8192
    poll_until(lambda: streaming.left() == before + 1, 60)


def test_a_slow_client_gets_all_of_it(streaming: Streaming):
    """For longer than a client without progress is given, and than an idle connection stays open."""
    received, pauses = 0, 20
    with streaming.ask("/whole") as opened:
        for pause in range(1, pauses + 1):
            select.select([], [], [], 3 * IDLE_SECONDS / pauses)
            while received < LARGE_BYTES * pause / pauses and (data := opened.recv(2**16)):
                received += len(data)
        opened.settimeout(STALL_SECONDS)
        with contextlib.suppress(TimeoutError):
            received += len(opened.recv(2**16))  # the head's length
    assert received > LARGE_BYTES

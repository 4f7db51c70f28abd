"""What leaves in one write, and how a client's leaving is noticed: the server's own HTTP over a transport that records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from serving import async_poll_until, raw_request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from server.drain import Drain
from server.hangup import until_hangup
from server.metrics import Metrics
from server.middleware import RequestContext
from server.protocol import HearthProtocol
from server.settings import load_settings
from server.sse import event_stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

LARGE = bytes(2**14)
CHUNK = b"%x\r\n%b\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return CHUNK % (len(data), data)


class Recorder(asyncio.Transport):
    """Keeps each write. Once more than `room` bytes have come, whoever writes is asked to wait."""

    def __init__(self, protocol: HearthProtocol, room: int) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self._protocol = protocol
        self._room = room
        self._closing = False

    def write(self, data: Any) -> None:
        self.writes.append(data)
        self._room -= len(data)
        if self._room < 0:
            self._protocol.pause_writing()

    def take(self, room: int) -> None:
        self._room = room
        self._protocol.resume_writing()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Connection:
    """One client's, to an app whose answers wait for `gate` and the like. No network, no second thread."""

    def __init__(self, room: int = 2**30) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.left: list[str] = []
        streams = {"events": self._answer, "quick": _quick, "large": _large, "broken": _broken}
        routes = [Route(f"/{name}", _streamed(events), methods=["POST"]) for name, events in streams.items()]
        routes.append(Route("/waiting", _streamed(self._waiting, keep_alive_seconds=0.01), methods=["POST"]))
        routes.append(Route("/plain", _plain, methods=["POST"]))
        routes.append(Route("/slow", self._slow, methods=["POST"]))
        routes.append(Route("/head", _HeadFirst(self.gate)))
        app = Starlette(routes=routes, middleware=[Middleware(RequestContext)])
        app.state.settings, app.state.metrics, app.state.drain = load_settings(), Metrics(dict), Drain()
        app.state.access_log = self.log = []
        config = uvicorn.Config(app, http=HearthProtocol, ws="none", log_config=None, access_log=False, lifespan="off")
        config.load()
        self.state = ServerState()
        self.protocol = HearthProtocol(config, self.state, {}, asyncio.get_running_loop())
        self.transport = Recorder(self.protocol, room)
        self.writes = self.transport.writes
        self.protocol.connection_made(self.transport)

    async def _slow(self, request: Request) -> Response:
        await request.body()
        return Response(await until_hangup(self._work(), request.receive, request.app.state.drain))

    async def _work(self) -> bytes:
        self.begun.set()
        try:
            await self.gate.wait()
        finally:
            self.left.append("slow")
        return b"done"

    async def _answer(self) -> AsyncGenerator[bytes, None]:
        yield b"one"
        async for event in self._waiting():
            yield event

    async def _waiting(self) -> AsyncGenerator[bytes, None]:
        self.begun.set()
        try:
            await self.gate.wait()
            yield b"two"
            yield b"three"
        finally:
            self.left.append("stream")

    async def written(self, count: int) -> list[bytes]:
        """What has been written, once it was that many times."""
        await async_poll_until(lambda: len(self.writes) >= count, 5)
        return self.writes

    async def ended(self) -> None:
        """Until nothing runs any more for this connection."""
        await async_poll_until(lambda: not self.state.tasks, 5)


class _HeadFirst:
    """Sends a head, and its body much later."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await self._gate.wait()
        await send({"type": "http.response.body", "body": b"late"})


async def _plain(request: Request) -> Response:
    return Response(await request.body())


def _streamed(
    events: Callable[[], AsyncGenerator[bytes, None]], *, keep_alive_seconds: float = 60
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        await request.body()
        return event_stream(events(), drain=request.app.state.drain, keep_alive_seconds=keep_alive_seconds)

    return answer


async def _quick() -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield b"%d" % number


async def _large() -> AsyncGenerator[bytes, None]:
    for _ in range(100):
        yield LARGE


async def _broken() -> AsyncGenerator[bytes, None]:
    yield b"one"
    raise RuntimeError("broken")


def ask(path: str, body: bytes = b"{}", method: str = "POST") -> bytes:
    return raw_request(method, path, {}, body)


async def test_a_plain_answer_leaves_in_one_write():
    connection = Connection()
    connection.protocol.data_received(ask("/plain", b"hello"))
    await connection.ended()
    (answer,) = connection.writes
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nhello")


async def test_the_head_leaves_with_the_first_event_and_the_end_with_the_last():
    connection = Connection()
    connection.protocol.data_received(ask("/events"))
    await connection.begun.wait()
    (first,) = await connection.written(1)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n" + chunk(b"one"))
    connection.gate.set()
    await connection.ended()
    assert connection.writes[1:] == [chunk(b"two") + chunk(b"three") + END]


async def test_an_answer_without_a_pause_leaves_in_one_write_and_the_next_after_it():
    connection = Connection()
    connection.protocol.data_received(ask("/quick") + ask("/plain", b"next"))
    await connection.ended()
    first, second = connection.writes
    assert first.endswith(chunk(b"0") + chunk(b"1") + chunk(b"2") + END)
    assert second.endswith(b"\r\n\r\nnext")


async def test_a_head_does_not_wait_for_a_body_that_comes_later():
    connection = Connection()
    connection.protocol.data_received(ask("/head", b"", "GET"))
    (head,) = await connection.written(1)
    assert head.endswith(b"\r\n\r\n")
    connection.gate.set()
    await connection.ended()
    assert connection.writes[1:] == [b"late"]


async def test_a_comment_is_written_while_the_first_event_is_waited_for():
    connection = Connection()
    connection.protocol.data_received(ask("/waiting"))
    head, *comments = await connection.written(3)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"".join([head, *comments]).endswith(chunk(b": keep-alive\n\n") * 2)
    connection.gate.set()
    await connection.ended()
    assert connection.writes[-1] == chunk(b"two") + chunk(b"three") + END


async def test_no_more_is_held_than_a_little_and_a_client_that_takes_nothing_holds_the_app_up():
    connection = Connection(room=10 * len(LARGE))
    connection.protocol.data_received(ask("/large"))
    await async_poll_until(lambda: connection.protocol.flow.write_paused, 5)
    assert max(map(len, connection.writes)) <= 2**16
    assert 10 <= sum(map(len, connection.writes)) / len(LARGE) < 16
    connection.transport.take(2**30)
    await connection.ended()
    assert b"".join(connection.writes).endswith(chunk(LARGE) * 100 + END)


async def test_what_fails_after_the_first_event_is_told_after_it():
    connection = Connection()
    connection.protocol.data_received(ask("/broken"))
    await connection.ended()
    answer = b"".join(connection.writes)
    _, body = answer.split(b"\r\n\r\n", 1)
    assert body.startswith(chunk(b"one"))
    assert b'"error"' in body
    assert body.endswith(END)


@pytest.mark.parametrize("path", ["/events", "/slow", "/waiting"])
async def test_a_client_that_leaves_is_noticed_without_a_task_that_watches(path: str):
    connection = Connection()
    before = asyncio.all_tasks()
    connection.protocol.data_received(ask(path) + ask("/plain"))  # another waits behind it
    await connection.begun.wait()
    assert asyncio.all_tasks() - before == connection.state.tasks
    connection.protocol.connection_lost(None)
    await connection.ended()
    assert connection.left == ["slow" if path == "/slow" else "stream"]
    assert [record.status for record in connection.log] == [499]


async def test_what_is_no_request_ends_a_stream_and_is_not_answered_within_it():
    connection = Connection()
    connection.protocol.data_received(ask("/events"))
    await connection.written(1)
    connection.protocol.data_received(b"\0\r\n\r\n")
    await connection.ended()
    assert connection.left == ["stream"]
    assert len(connection.writes) == 1
    assert connection.transport.is_closing()
    assert [record.status for record in connection.log] == [499]


async def test_a_connection_holds_so_many_waiting_requests_and_no_more():
    connection = Connection()
    connection.protocol.data_received(ask("/quick") * 64)
    await async_poll_until(lambda: len(connection.log) == 64, 5)
    assert not connection.transport.is_closing()
    crowded = Connection()
    crowded.protocol.data_received(ask("/quick") * 66)
    assert b"too_many_pipelined" in b"".join(crowded.writes)
    await async_poll_until(crowded.transport.is_closing, 5)


async def test_below_another_server_events_are_sent_and_a_client_that_leaves_is_noticed():
    gate, left, sent = asyncio.Event(), asyncio.Event(), []

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"
        await gate.wait()

    app = RequestContext(event_stream(events(), drain=Drain(), keep_alive_seconds=60))
    state = Starlette()
    state.state.metrics, state.state.access_log = Metrics(dict), (log := [])
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "app": state}
    task = asyncio.create_task(app(scope, receive, send))
    await async_poll_until(lambda: len(sent) == 3, 5)
    assert [message.get("body") for message in sent] == [None, b"one", b"two"]
    left.set()
    await task
    assert [record.status for record in log] == [499]

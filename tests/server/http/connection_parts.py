"""A client's connection to the server's own HTTP, over a transport that records, and an app that answers when told to."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import uvicorn
from serving import async_poll_until, raw_request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server.http.disconnect import Drain, until_disconnect
from server.http.middleware import RequestContext
from server.http.protocol import HearthProtocol
from server.http.streaming import StreamedResponse
from server.observability.metrics import Metrics
from server.observability.status_server import Lately
from server.settings import load_settings

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
        routes.append(Route("/bug", _bug, methods=["POST"]))
        routes.append(Route("/slow", self._slow, methods=["POST"]))
        routes.append(Route("/head", _HeadFirst(self.gate)))
        app = Starlette(routes=routes, middleware=[Middleware(RequestContext)])
        app.state.settings, app.state.metrics, app.state.drain = load_settings(), Metrics(()), Drain()
        app.state.access_log, app.state.tracing = [], None
        self.log = app.state.access_log
        app.state.lately = Lately(app.state.metrics)
        config = uvicorn.Config(app, http=HearthProtocol, ws="none", log_config=None, access_log=False, lifespan="off")
        config.load()
        self.state = ServerState()
        self.protocol = HearthProtocol(config, self.state, {}, asyncio.get_running_loop())
        self.transport = Recorder(self.protocol, room)
        self.writes = self.transport.writes
        self.protocol.connection_made(self.transport)

    async def _slow(self, request: Request) -> Response:
        self.request = weakref.ref(request)
        await request.body()
        return Response(await until_disconnect(self._work(), request))

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
        await async_poll_until(lambda: len(self.writes) >= count, 60)
        return self.writes

    async def ended(self) -> None:
        """Until nothing runs any more for this connection."""
        await async_poll_until(lambda: not self.state.tasks, 60)


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


async def _bug(request: Request) -> Response:
    raise RuntimeError((await request.body()).decode())


def _streamed(
    events: Callable[[], AsyncGenerator[bytes, None]], *, keep_alive_seconds: float | None = None
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        await request.body()
        return StreamedResponse(events(), keep_alive_seconds=keep_alive_seconds)

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

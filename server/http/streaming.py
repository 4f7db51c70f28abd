"""Streamed answers, as server-sent events or as a file. A failure before the first piece keeps its HTTP status.

A later failure becomes an error event or, in a file, a connection that ends before the body does. The caller makes the
pieces: an `Encoder` for steps of a model, or any iterator of bytes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine import ChatStep, Usage
from engine.stream import TokenStream
from server.errors import ApiError, to_api_error
from server.http.bodies import GIVE_BACK
from server.http.disconnect import CancelOnDisconnect, ClientDisconnectedError
from server.http.protocol import Connection
from server.observability.access_log import RequestRecord

_log = logging.getLogger("hearth.server")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEEP_ALIVE = b": keep-alive\n\n"


class Encoder(Protocol):
    """Makes the events of one answer; each call returns bytes to write in one piece, which may be empty."""

    def start(self) -> bytes:
        """Return what is written before the first step."""

    def step(self, step: ChatStep) -> bytes:
        """Return the events of one engine step."""

    def end(self, usage: Usage) -> bytes:
        """Return what ends a complete answer."""


class TokenEvents:
    """The events of one streamed answer, from the engine's steps to bytes; fills the request's record on the way.

    `opening` returns the stream. `naming` renames the fields in errors as the client sent them. Once `body` is set, a
    step is written as soon as it is made: waking the request's task would double the cost of a token. What cannot be
    written then is yielded. Each step is encoded once: encoders keep state.
    """

    def __init__(
        self,
        opening: Callable[[], Awaitable[TokenStream]],
        encoder: Encoder,
        record: RequestRecord,
        naming: AbstractContextManager[object] | None = None,
    ) -> None:
        self.body: Body | None = None
        self._opening = opening
        self._encoder = encoder
        self._record = record
        self._naming = naming or nullcontext()

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces that `_take` could not write. Closing it aborts the answer."""
        record, encoder = self._record, self._encoder
        head: bytes | None = None
        with self._naming:
            async with await self._opening() as stream:
                del self._opening  # it refers to the request, with its pictures
                stream.sink = self._take
                try:
                    async for step in stream:
                        if record.stream:
                            record.first_token()
                        head = encoder.start() if head is None else b""
                        data = head + encoder.step(step)
                        if data:
                            yield data
                finally:
                    record.streamed(stream.last)
        if stream.usage is not None:
            yield encoder.end(stream.usage)

    def _take(self, step: ChatStep) -> bool:
        body = self.body
        if body is None or not body.can_write():
            return False
        if data := self._encoder.step(step):
            body.write_at_once(data)
        return True


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which fails after its start."""
    return b"data: " + msgspec.json.encode({"error": error.body()}) + b"\n\n"


class StreamedResponse(Response):
    """Answers with `events`, each item one write. Nothing is sent before the first item.

    So a failure before it keeps its HTTP status. If `keep_alive_seconds` pass without one, the answer begins anyway,
    and a comment is sent in each such interval. `failure` encodes a failure after the start; None: the body is left
    incomplete and the connection closed. `always_event`: whether an error is an event even before the start, because
    clients look for it there.
    """

    def __init__(
        self,
        events: TokenEvents | AsyncIterator[bytes],
        *,
        media_type: str = "text/event-stream",
        keep_alive_seconds: float | None = None,
        failure: Callable[[ApiError], bytes] | None = error_event,
        always_event: Callable[[ApiError], bool] = lambda _: False,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds
        self._failure = failure
        self._always_event = always_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's
        """Send the events until they end, the client leaves, or the server ends. Raises failures before the start."""
        record: RequestRecord = scope["state"]["record"]
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        connection = Connection.of(scope)
        if scope["http_version"] == "1.0":
            connection.end_with_connection()
        body = Body(send, start, connection)
        last = b""
        try:
            async with CancelOnDisconnect(scope), _keep_alive(body, self._keep_alive_seconds):
                await self._pump(body, scope.pop(GIVE_BACK, None))
        except ClientDisconnectedError:
            if not body.begun:
                raise
            record.status = 499
            return
        except Exception as error:
            if not body.begun and not (isinstance(error, ApiError) and self._always_event(error)):
                raise
            api_error = to_api_error(error)  # the status is sent: the error can only be an event
            record.refused(api_error)
            if self._failure is None:
                _log.warning("An answer was cut off (%s): %s", record.request_id, api_error.message)
                return
            last = self._failure(api_error)
        await body.write(last, more=False)

    async def _pump(self, body: "Body", give_back: Callable[[], None] | None) -> None:
        """Write the events. At the first one, `give_back` stops counting the request's body."""
        pieces: Any = aiter(self._events)
        try:
            first = await anext(pieces, b"")
            if give_back is not None:
                give_back()
            await body.write(first)
            if isinstance(self._events, TokenEvents):
                self._events.body = body
            async for piece in pieces:
                if piece and body.can_write():
                    body.write_at_once(piece)
                else:
                    await body.write(piece)
        finally:
            await pieces.aclose()


class Body:
    """The body of an answer, and how much of it has been sent."""

    def __init__(self, send: Send, start: Message, connection: Connection) -> None:
        self._send = send
        self._start = start
        self._connection = connection
        self._writing = asyncio.Lock()  # a comment must not come between an answer's head and its first piece
        self.begun = False
        self.pieces = 0

    def can_write(self) -> bool:
        return self._connection.can_write()

    def write_at_once(self, data: bytes) -> None:
        self._connection.write(data)
        self.pieces += 1

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Write the next or last piece, at first with the answer's head. Waits for a slow client."""
        self.pieces += 1
        async with self._writing:
            if not self.begun:
                await self._send(self._start)
                self.begun = True
            if not more:
                self._connection.last_comes(len(data))
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


@asynccontextmanager
async def _keep_alive(body: Body, seconds: float | None) -> AsyncIterator[None]:
    """Write a comment in each interval of `seconds` without a piece; None: no comments."""
    if seconds is None:
        yield
        return

    commenting: asyncio.Task[None] | None = None

    async def comment() -> None:
        seen = 0
        while True:
            if body.pieces == seen:
                await body.write(_KEEP_ALIVE)
            seen = body.pieces
            await asyncio.sleep(seconds)

    def begin() -> None:
        nonlocal commenting
        commenting = asyncio.create_task(comment())

    # A task only for a stream that lasts: most end before they need a comment.
    timer = asyncio.get_running_loop().call_later(seconds, begin)
    try:
        yield
    finally:
        timer.cancel()
        if commenting is not None:  # and wait, so that no comment is cut
            commenting.cancel()
            await asyncio.wait((commenting,))
            if not commenting.cancelled():
                commenting.result()

"""Answers that come piece by piece, as server-sent events or as a file: real HTTP errors until the first piece.

What fails after it is told by an error event, or, in a file, by a connection that ends before the body does.
What the pieces are is the caller's (server/schemas/chat_answer.py); this file owns the response around them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from server.errors import to_api_error
from server.exchange import Exchange
from server.hangup import ClientGoneError, Hangup

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.types import Message, Receive, Scope, Send

    from server.access_log import RequestRecord
    from server.drain import Drain
    from server.errors import ApiError
    from server.events import AtOnce

_log = logging.getLogger("hearth.server")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEEP_ALIVE = b": keep-alive\n\n"


def error_event(error: ApiError) -> bytes:
    """Encode what a stream ends with when it fails after its start."""
    return b"data: " + msgspec.json.encode({"error": error.body()}) + b"\n\n"


def event_stream(
    events: AsyncGenerator[bytes, None],
    *,
    drain: Drain,
    keep_alive_seconds: float,
    failure: Callable[[ApiError], bytes] = error_event,
    at_once: AtOnce | None = None,
) -> Response:
    """Answer with `events`, each item one write; `failure` encodes a failure after the start.

    Nothing is sent before the first item, so that a failure before it keeps its HTTP status; if that takes longer than
    `keep_alive_seconds`, the stream opens all the same and a comment goes out in every such interval. After it,
    `at_once` may write beside `events`.
    """
    body = _StreamedBody(events, drain, "text/event-stream", keep_alive_seconds, failure)
    body.at_once = at_once
    return body


def file_stream(pieces: AsyncGenerator[bytes, None], *, media_type: str, drain: Drain) -> Response:
    """Answer with `pieces` of a file; the first is waited for, however long it takes."""
    return _StreamedBody(pieces, drain, media_type, None, None)


async def with_keep_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield `events`, and comments while one after the first takes long: for streams with long pauses inside."""
    following: asyncio.Future[bytes] | None = None
    try:
        data = await anext(events, b"")
        while data:
            yield data
            following = asyncio.ensure_future(anext(events, b""))
            while not following.done():
                await asyncio.wait((following,), timeout=seconds)
                if not following.done():
                    yield _KEEP_ALIVE
            data = following.result()
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait((following,))
        await events.aclose()


class _StreamedBody(Response):
    """Without `failure` a body that fails is not ended, and the connection closed: so the client knows."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        drain: Drain,
        media_type: str,
        keep_alive_seconds: float | None,
        failure: Callable[[ApiError], bytes] | None,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._drain = drain
        self._keep_alive_seconds = keep_alive_seconds
        self._failure = failure
        self.at_once: AtOnce | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client leaves, or the server does. What fails before is raised."""
        record: RequestRecord = scope["state"]["record"]
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        out = _Body(send, start, Exchange.behind(receive))
        last = b""
        try:
            async with Hangup(receive, self._drain):
                await self._pump(out)
        except ClientGoneError:
            if not out.begun:
                raise
            record.status = 499
            return
        except Exception as error:
            if not out.begun:
                raise
            api_error = to_api_error(error)  # the status is sent: what goes wrong now can only be an event
            record.error_code = api_error.code
            if self._failure is None:
                _log.warning("An answer was cut off (%s): %s", record.request_id, api_error.message)
                return
            last = self._failure(api_error)
        await out.end(last)

    async def _pump(self, out: _Body) -> None:
        async with aclosing(self._events) as events:
            async with _Comments(out, self._keep_alive_seconds):
                first = await anext(events, b"")
            await out.write(first)
            if self.at_once is not None:
                self.at_once.write = out.write_at_once
            async for event in events:
                if not out.write_at_once(event):
                    await out.write(event)


class _Body:
    """What has been sent of the answer."""

    def __init__(self, send: Send, start: Message, exchange: Exchange | None) -> None:
        self._send = send
        self._start = start
        # Below another server than ours all goes through `send`.
        self.write_at_once: Callable[[bytes], bool] = exchange.write if exchange is not None else lambda _: False
        self.begun = False

    async def write(self, data: bytes) -> None:
        if not self.begun:
            await self._send(self._start)
            self.begun = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, last: bytes) -> None:
        await self._send({"type": "http.response.body", "body": last})


class _Comments:
    """`async with`: a comment in every such interval, from a task of its own. None: none."""

    def __init__(self, out: _Body, seconds: float | None) -> None:
        self._out = out
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._begin, self._seconds)

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:  # never in the middle of a comment
            self._task.cancel()
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.result()

    def _begin(self, seconds: float) -> None:
        self._task = asyncio.create_task(self._comment(seconds))

    async def _comment(self, seconds: float) -> None:
        while True:
            await self._out.write(_KEEP_ALIVE)
            await asyncio.sleep(seconds)

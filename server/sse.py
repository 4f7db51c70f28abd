"""Answers as server-sent events: real HTTP errors until the first event, an error event after it, never both.

What the events say is the caller's (server/schemas/chat_chunks.py); this file owns the response around them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from server.errors import to_api_error
from server.hangup import ClientGoneError, until_hangup

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from server.access_log import RequestRecord
    from server.drain import Drain
    from server.errors import ApiError

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEEP_ALIVE = b": keep-alive\n\n"


def error_event(error: ApiError) -> bytes:
    """Encode what a stream ends with when it fails after its start."""
    return b"data: " + msgspec.json.encode({"error": error.body()}) + b"\n\n"


async def event_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    *,
    drain: Drain,
    keep_alive_seconds: float,
    failure: Callable[[ApiError], bytes] = error_event,
) -> Response:
    """Start `events` and answer with them, each item one write; `failure` encodes a failure after the start.

    Waits for the first item, so that a failure before it keeps its HTTP status; if that takes longer than
    `keep_alive_seconds`, the stream opens all the same and a comment goes out in every such interval.
    """
    first = asyncio.ensure_future(anext(events, b""))
    try:
        await until_hangup(_settled(first, keep_alive_seconds), request.receive, drain)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.wait((first,))
        await events.aclose()
        raise
    return _EventStream(first, events, drain, keep_alive_seconds, failure)


async def _settled(first: asyncio.Future[bytes], seconds: float) -> None:
    await asyncio.wait((first,), timeout=seconds)


class _EventStream(Response):
    def __init__(
        self,
        first: asyncio.Future[bytes],
        events: AsyncGenerator[bytes, None],
        drain: Drain,
        keep_alive_seconds: float,
        failure: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._drain = drain
        self._keep_alive_seconds = keep_alive_seconds
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client leaves, or the server does."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        record: RequestRecord = scope["state"]["record"]
        last = b""
        try:
            await until_hangup(self._pump(send), receive, self._drain)
        except ClientGoneError:
            record.status = 499
            return
        except Exception as error:  # noqa: BLE001  # the status is sent: what goes wrong now can only be an event
            api_error = to_api_error(error)
            record.error_code = api_error.code
            last = self._failure(api_error)
        await send({"type": "http.response.body", "body": last})

    async def _pump(self, send: Send) -> None:
        try:
            while not self._first.done():
                await asyncio.wait((self._first,), timeout=self._keep_alive_seconds)
                if not self._first.done():
                    await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
            await send({"type": "http.response.body", "body": self._first.result(), "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            if not self._first.done():
                self._first.cancel()
                await asyncio.wait((self._first,))
            await self._events.aclose()

"""Answers that come piece by piece, as server-sent events or as a file: real HTTP errors until the first piece.

What fails after it is told by an error event, or, in a file, by a connection that ends before the body does.
What the pieces are is the caller's (server/schemas/chat_answer.py); this file owns the response around them.
"""

from __future__ import annotations

import asyncio
import logging
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

_log = logging.getLogger("hearth.server")
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
    first = await _begun(request, events, drain, keep_alive_seconds)
    return _StreamedBody(first, events, drain, "text/event-stream", keep_alive_seconds, failure)


async def file_stream(
    request: Request, pieces: AsyncGenerator[bytes, None], *, media_type: str, drain: Drain
) -> Response:
    """Start `pieces` of a file and answer with them; the first is waited for, however long it takes."""
    first = await _begun(request, pieces, drain, None)
    return _StreamedBody(first, pieces, drain, media_type, None, None)


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


async def _begun(
    request: Request, pieces: AsyncGenerator[bytes, None], drain: Drain, longest_seconds: float | None
) -> asyncio.Future[bytes]:
    """Return the first of `pieces`, after that time perhaps still to come. If it fails they are closed."""
    first = asyncio.ensure_future(anext(pieces, b""))
    try:
        await until_hangup(_settled(first, longest_seconds), request.receive, drain)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.wait((first,))
        await pieces.aclose()
        raise
    return first


async def _settled(first: asyncio.Future[bytes], seconds: float | None) -> None:
    await asyncio.wait((first,), timeout=seconds)


class _StreamedBody(Response):
    """Without `failure` a body that fails is not ended, and the connection closed: so the client knows."""

    def __init__(  # noqa: PLR0913, PLR0917  # of this file alone
        self,
        first: asyncio.Future[bytes],
        events: AsyncGenerator[bytes, None],
        drain: Drain,
        media_type: str,
        keep_alive_seconds: float | None,
        failure: Callable[[ApiError], bytes] | None,
    ) -> None:
        super().__init__(headers=_HEADERS, media_type=media_type)
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
            if self._failure is None:
                _log.warning("An answer was cut off (%s): %s", record.request_id, api_error.message)
                return
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

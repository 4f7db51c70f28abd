"""One request and its answer, between uvicorn and the app: what the app sends in one go leaves in one write.

HTTP itself is uvicorn's; connections and their limits are protocol.py's, whose every request runs in one of these.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Generator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_MOST_HELD_BYTES = 2**16  # more is written at once: asyncio begins to hold back who writes more than that


class Exchange:
    """The app as uvicorn sees it, for one request.

    Each write is a system call; four of them were 12 % of what a streamed answer of one token cost. So what is sent is
    held until the app waits for something, or the answer is complete: never longer, and nothing else runs meanwhile.
    """

    def __init__(self, cycle: RequestResponseCycle, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._app = app
        self._loop = loop
        self._watchers: list[asyncio.Future[None]] = []
        self._outgoing = _Outgoing(cycle.transport)
        self._on_response = cycle.on_response
        outgoing: Any = self._outgoing
        cycle.transport, cycle.on_response = outgoing, self._end

    @staticmethod
    def behind(receive: Receive) -> Exchange | None:
        """Return the exchange that `receive` belongs to; None below another server, or if something wraps it."""
        found = getattr(receive, "__self__", None)
        return found if isinstance(found, Exchange) else None

    @types.coroutine
    def __call__(self, scope: Scope, _: Receive, send: Send) -> Generator[Any, Any, None]:
        """Run the app, and write what it sent each time it waits."""
        work: Any = self._app(scope, self.receive, send)
        outgoing, resume, value = self._outgoing, work.send, None
        while True:
            outgoing.holding = True
            try:
                awaited = resume(value)
            except BaseException as end:
                value = None  # no circle of an error and this frame: it would hold the request's body
                outgoing.release()
                if isinstance(end, StopIteration):
                    return end.value  # type: ignore[no-any-return]  # uvicorn checks that it is None
                raise
            try:
                outgoing.release()  # should that fail, the app has to end in good order all the same
                resume, value = work.send, (yield awaited)
            except BaseException as error:  # noqa: BLE001  # the app's to handle, as if it had waited itself
                resume, value = work.throw, error

    def receive(self) -> Awaitable[Message]:
        """Return the next message of the request, as ASGI wants it."""
        message: Awaitable[Any] = self._cycle.receive()
        return message

    def body_has_come(self) -> bool:
        """Whether the next `receive` tells, without a wait, the whole of the body, or that the client has left."""
        return self._cycle.message_event.is_set() and not self._cycle.more_body

    def write(self, data: bytes) -> bool:
        """Send `data` as the next piece of a body that has begun and goes on; False if `send` has to, which may wait.

        Past what middlewares make of `send`, who look at an answer's head only: 1 us for each token.
        """
        cycle = self._cycle
        if not data or not cycle.chunked_encoding or cycle.flow.write_paused:
            return False
        if not cycle.disconnected:
            self._outgoing.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def gone(self) -> asyncio.Future[None]:
        """Return a future that is done once the client has left. The request's body must have been read."""
        watcher = self._loop.create_future()
        if self._cycle.disconnected:
            watcher.set_result(None)
        else:
            self._cycle.flow.resume_reading()  # a long body has paused it, and who does not read notices nothing
            self._watchers.append(watcher)
        return watcher

    def lose(self) -> None:
        """Tell whoever wants to know that the client has left."""
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _end(self) -> None:
        self._outgoing.flush()
        self._on_response()


class _Outgoing:
    """What uvicorn takes for its transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.holding = False  # until `release`
        self.is_closing: Callable[[], bool] = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self.holding or len(self._held) + len(data) > _MOST_HELD_BYTES:
            if self._held:  # not left to `flush`: one call less per token
                self.flush()
            self._transport.write(data)
        else:
            self._held += data

    def release(self) -> None:
        self.holding = False
        self.flush()

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()

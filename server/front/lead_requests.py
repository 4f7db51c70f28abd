"""One HTTP request that a front has left to the lead: its app answers as if the request had come to it.

The client takes the answer at its own pace: no more is sent ahead than a window, and no body is read before it is asked
for, so that neither process holds what nobody takes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.front.messages import Body, End, Gone, More, Piece, Start, Taken

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Scope

    from server.app import HearthApp
    from server.front.messages import Request, ToFront

_WINDOW_BYTES = 2**18


class LeadRequest:
    """Lives as long as the request. `run` answers it; `on_message` takes what its front says of it."""

    def __init__(self, app: HearthApp, request: Request, say: Callable[[ToFront], None]) -> None:
        self._app = app
        self._request = request
        self._say = say
        self._bodies: asyncio.Queue[Message] = asyncio.Queue()
        self._asked = False
        self._untaken_bytes = 0
        self._taken = asyncio.Event()

    async def run(self) -> None:
        """Answer. An answer that is not complete by then is cut off by the front."""
        try:
            await self._app(self._scope(), self._receive, self._send)
        finally:
            self._say(End(self._request.call))

    def on_message(self, message: Taken | Body | Gone) -> None:
        """Go on, with what was waited for."""
        if isinstance(message, Taken):
            self._untaken_bytes -= message.size_bytes
            self._taken.set()
        elif isinstance(message, Body):
            self._bodies.put_nowait({"type": "http.request", "body": message.data, "more_body": message.more})
        else:
            self._bodies.put_nowait({"type": "http.disconnect"})

    def _scope(self) -> Scope:
        request = self._request
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version,
            "server": request.server,
            "client": request.client,
            "scheme": request.scheme,
            "method": request.method,
            "root_path": request.root_path,
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query_string,
            "headers": request.headers,
            "state": {},
        }

    async def _receive(self) -> Message:
        if not self._asked:  # else whoever asked has stopped waiting, and what comes is still to come
            self._asked = True
            self._say(More(self._request.call))
        message = await self._bodies.get()
        self._asked = False
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._say(Start(self._request.call, message["status"], message.get("headers", [])))
            return
        data, more = message.get("body", b""), message.get("more_body", False)
        self._say(Piece(self._request.call, data, more))
        if not more:
            return
        self._untaken_bytes += len(data)
        while self._untaken_bytes > _WINDOW_BYTES:
            self._taken.clear()
            await self._taken.wait()

"""Leaves HTTP requests to the lead: what a front does not answer itself, it passes on, body and answer, as they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.front.messages import Body, End, Failed, Gone, More, Piece, Request, Start, Taken

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from server.front.lead import Lead, Line


class Forward:
    """An ASGI app. The lead's middleware gives the answer its id, its headers and its line in the log."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the lead answer one request."""
        reading: asyncio.Task[None] | None = None
        async with self._lead.line() as line:
            self._lead.say(_request(line.number, scope))
            try:
                while not isinstance(message := await line.next(), End | Failed):
                    if isinstance(message, More):
                        reading = asyncio.create_task(self._read(line, receive))
                    elif isinstance(message, Start):
                        headers = list(message.headers)
                        await send({"type": "http.response.start", "status": message.status, "headers": headers})
                    elif isinstance(message, Piece):
                        await send({"type": "http.response.body", "body": message.data, "more_body": message.more})
                        if message.more:
                            self._lead.say(Taken(line.number, len(message.data)))
            finally:
                if reading is not None:
                    reading.cancel()

    async def _read(self, line: Line, receive: Receive) -> None:
        message = await receive()
        if message["type"] == "http.request":
            self._lead.say(Body(line.number, message.get("body", b""), message.get("more_body", False)))
        else:
            self._lead.say(Gone(line.number))


def _request(number: int, scope: Scope) -> Request:
    return Request(
        number,
        scope["http_version"],
        scope["server"],
        scope["client"],
        scope["scheme"],
        scope["method"],
        scope["root_path"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        scope["headers"],
    )

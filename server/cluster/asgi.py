"""Our app behind the proxy of Ray Serve: there is no connection of ours, and what is sent is a message to the proxy."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.protocol import Connection

_MESSAGE_SECONDS = 0.02  # between two messages of a stream: each costs more than a token


class ProxiedConnection(Connection):
    """What an answer may know and do of its client's connection, which the proxy has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self._left = False
        self._on_disconnect: Callable[[], None] | None = None
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        self._begun = True
        self._flush()
        if message["type"] == "http.response.start":  # the proxy adds the id, which it has given the request
            message["headers"] = [header for header in message["headers"] if header[0] != b"x-request-id"]
        await self._send(message)

    def write(self, data: bytes) -> None:
        """Send a piece without a wait: at once after a pause, else with those of the next milliseconds."""
        self._unsent.append(data)
        if self._timer is None:
            self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent and not self._left:
            data, self._unsent = b"".join(self._unsent), []
            with suppress(StopIteration):  # Serve's `send` puts it on a queue, and never waits itself
                self._send({"type": "http.response.body", "body": data, "more_body": True}).send(None)  # type: ignore[attr-defined]
                raise RuntimeError("`send` of Ray Serve has waited")
            self._timer = asyncio.get_running_loop().call_later(_MESSAGE_SECONDS, self._flush)

    def can_write(self) -> bool:
        return self._begun

    def end_with_connection(self) -> None:
        """Leave it to the proxy."""

    def last_comes(self, size: int) -> None:
        """Leave it to the proxy."""

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        self._on_disconnect = on_disconnect
        if on_disconnect is not None and self._left:
            asyncio.get_running_loop().call_soon(on_disconnect)

    def client_left(self) -> None:
        self._left = True
        super().client_left()

    @property
    def watched(self) -> bool:
        return self._on_disconnect is not None


class ProxiedApp:
    """Makes of Serve's cancelling a client that has left. The lifespan is the replica's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        connection = ProxiedConnection(send)
        running = self._app({**scope, "hearth.connection": connection}, receive, connection.send)
        working: asyncio.Task[None] = asyncio.create_task(running)  # type: ignore[arg-type]  # it is a coroutine
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            if connection.watched:
                connection.client_left()
            else:
                working.cancel()
            await asyncio.wait((working,))
            raise

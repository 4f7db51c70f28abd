"""Receives what the engine process sends, and sends it requests, without pyzmq's asyncio layer.

That layer costs a third of what a step costs the API process (polls, flags and futures per message). Here every message
that has come is taken when the socket wakes the event loop, and what is sent goes where there is room for it, as nearly
always. What the messages mean stays vLLM's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
import zmq.backend

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

# zmq's compiled half, and its enumerations as numbers: those cost more than what is done with them.
_BARE: Any = zmq.backend.Socket
_NOBLOCK, _MORE_NOBLOCK = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)
_SENT = (bytes, memoryview, zmq.Frame)  # anything else would be found out after the parts before it are gone
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def receive_eagerly(engine: Any) -> None:
    """Put the inbox in place of the started `AsyncLLM`'s output socket, before anything has been received from it."""
    socket = engine.engine_core.resources.output_socket
    if type(socket) is zmq.asyncio.Socket:
        socket.__class__ = _Inbox


def send_at_once(engine: Any) -> None:
    """Put the outbox in place of its input socket."""
    socket = engine.engine_core.input_socket
    if type(socket) is zmq.asyncio.Socket:
        socket.__class__ = _Outbox


class _Outbox(zmq.asyncio.Socket):
    """Used in one event loop, for sending. What goes wrong is raised by the call, not by the future."""

    def send_multipart(self, parts: Sequence[Any], *options: Any, **named: Any) -> Awaitable[Any]:  # type: ignore[override]
        """Return a future that is done, unless the message has to wait: for room, or for others that do."""
        copy = named.get("copy", True)
        usual = not options and named.keys() <= {"copy"} and all(isinstance(part, _SENT) for part in parts)
        if self._send_futures or not usual:
            return super().send_multipart(parts, *options, **named)
        *before, last = parts
        try:
            for part in before:
                _BARE.send(self._shadow_sock, part, _MORE_NOBLOCK, copy, False)  # noqa: FBT003
            _BARE.send(self._shadow_sock, last, _NOBLOCK, copy, False)  # noqa: FBT003
        except zmq.Again:  # of the first part: the others have room where that had it. vLLM sets no limit at present
            return super().send_multipart(parts, copy=copy)
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        return sent


class _Inbox(zmq.asyncio.Socket):
    """Used by one task, in one event loop."""

    # zmq takes only attributes that its class has.
    _messages: deque[Sequence[zmq.Frame]] | None = None
    _waiter: asyncio.Future[None] | None = None

    async def recv_multipart(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Return the oldest message that was not returned yet."""
        if self._messages is None:
            self._messages = deque()
            self._get_loop()  # type: ignore[operator]  # from now on the loop calls `_handle_events`, at each change
            self._handle_events()
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()

    def _handle_events(self, *_: int) -> None:
        """Take all there is: the socket wakes the loop again only after it has been found empty."""
        if self._messages is None:
            return
        socket: Any = self._shadow_sock
        try:
            while True:
                self._messages.append(socket.recv_multipart(zmq.NOBLOCK, copy=False))
                if not _BARE.get(socket, _EVENTS) & _POLLIN:  # at half the price of the exception below
                    break
        except zmq.Again:
            pass
        if self._messages and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, linger: int | None = None) -> None:
        """End the wait of whoever waits, like zmq's own."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.cancel()
        super().close(linger=linger)

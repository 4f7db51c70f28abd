"""Receives what the engine process sends, once per step, without pyzmq's asyncio layer.

That layer costs a third of what a step costs the API process (polls, flags and futures per message). Here every message
that has come is taken when the socket wakes the event loop. What the messages mean stays vLLM's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from collections.abc import Sequence


def receive_eagerly(engine: Any) -> None:
    """Put the inbox in place of the started `AsyncLLM`'s output socket, before anything has been received from it."""
    socket = engine.engine_core.resources.output_socket
    if type(socket) is zmq.asyncio.Socket:
        socket.__class__ = _Inbox


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
                if not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # at half the price of the exception below
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

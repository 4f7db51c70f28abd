"""One connection between a front and its lead: what is said in one turn of the event loop travels in one write.

A frame is its length in four bytes, big-endian, then a list of messages in msgpack.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_LENGTH_BYTES = 4
_UNSAYABLE = (TypeError, ValueError, OverflowError)  # a UnicodeEncodeError is a ValueError
_In = TypeVar("_In")
_Out = TypeVar("_Out")

_log = logging.getLogger("hearth.front")


class Wire(asyncio.Protocol, Generic[_In, _Out]):
    """`kinds` is the union of what may come. `on_message` is called for each, `on_lost` once, at the end.

    `instead` is asked what to say in place of what msgpack cannot hold, like half a surrogate pair that a model wrote.
    """

    def __init__(
        self,
        kinds: Any,
        on_message: Callable[[_In], None],
        on_lost: Callable[[], None],
        instead: Callable[[_Out], _Out | None],
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[_In]] = msgspec.msgpack.Decoder(list[kinds])
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._on_lost = on_lost
        self._instead = instead
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsaid: list[_Out] = []
        self._came = bytearray()
        self.lost = asyncio.Event()

    async def open(self, end: socket.socket) -> None:
        """Begin to listen to the other side, on this end of a socket pair, which is ours from now on."""
        await self._loop.create_unix_connection(lambda: self, sock=end)

    def say(self, message: _Out) -> None:
        """Send it with whatever else is said in this turn. Never waits or fails; without a connection it is lost."""
        if not self._unsaid:
            self._loop.call_soon(self.flush)
        self._unsaid.append(message)

    def flush(self) -> None:
        """Send now."""
        unsaid, self._unsaid = self._unsaid, []
        if not unsaid or self._transport is None or self._transport.is_closing():
            return
        try:
            frame = self._frame(unsaid)
        except _UNSAYABLE:
            frame = self._frame([message for message in map(self._sayable, unsaid) if message is not None])
        self._transport.write(frame)

    def _frame(self, messages: list[_Out]) -> bytearray:
        frame = bytearray(_LENGTH_BYTES)
        self._encoder.encode_into(messages, frame, _LENGTH_BYTES)
        frame[:_LENGTH_BYTES] = (len(frame) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
        return frame

    def _sayable(self, message: _Out) -> _Out | None:
        """One that cannot be said must not take with it what others have said in the same turn."""
        try:
            self._encoder.encode(message)
        except _UNSAYABLE:
            _log.error("What cannot be sent between processes was left out: a %s.", type(message).__name__)
            return self._instead(message)
        return message

    def close(self) -> None:
        """Send what was said, and hang up."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # however it ended, it ended
        self.lost.set()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Hand over what is complete. A frame may be as large as a request's body with pictures in it."""
        self._came += data
        begin = 0
        while len(self._came) >= (start := begin + _LENGTH_BYTES):
            end = start + int.from_bytes(self._came[begin:start], "big")
            if len(self._came) < end:
                break
            with memoryview(self._came)[start:end] as content:
                messages = self._decoder.decode(content)
            begin = end
            for message in messages:
                self._on_message(message)
        del self._came[:begin]

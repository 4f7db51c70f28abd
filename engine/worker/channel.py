"""The parent's end of the socket to a worker: whole messages out and in, on the event loop, never blocking it.

Not an asyncio transport, because what a child said before it died must be read at once, before its death is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.worker.frames import FrameError, FrameReader, to_frame
from engine.worker.messages import ToParent

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from engine.worker.messages import ToChild

_CHUNK_BYTES = 2**18
# More than a socket's buffer holds. Somebody who inherited the child's end must not keep us here.
_MOST_LAST_READS = 64


class Channel:
    """Calls `on_message` for each message, and `on_lost` once when no more will come, but not after `close`.

    The argument of `on_lost` is None when the other side closed, else what is wrong about the bytes that came.
    """

    def __init__(
        self, end: socket.socket, on_message: Callable[[ToParent], None], on_lost: Callable[[str | None], None]
    ) -> None:
        end.setblocking(False)  # noqa: FBT003  # positional only
        self._end = end
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[ToParent] = FrameReader(ToParent)
        self._unsent = bytearray()
        self._reading = False
        self.resume()

    def send(self, message: ToChild) -> None:
        """Send when the child reads; what it has not taken in waits here. Raises `FrameError` for one too long."""
        frame = to_frame(message)
        if self._end.fileno() < 0:
            return
        waiting = bool(self._unsent)
        self._unsent += frame
        if not waiting:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._end.fileno(), self._write)

    def pause(self) -> None:
        """Read no more, so that the child waits, until `resume`."""
        if self._reading:
            self._loop.remove_reader(self._end.fileno())
            self._reading = False

    def resume(self) -> None:
        if not self._reading and self._end.fileno() >= 0:
            self._loop.add_reader(self._end.fileno(), self._read)
            self._reading = True

    @property
    def paused(self) -> bool:
        """Whether what the child says is not listened to."""
        return not self._reading

    def drain(self) -> None:
        """Read what a dead child has left."""
        for _ in range(_MOST_LAST_READS):
            if not self._read():
                return

    def close(self) -> None:
        """Let go of the socket. Safe to call twice."""
        if self._end.fileno() < 0:
            return
        self.pause()
        self._loop.remove_writer(self._end.fileno())
        self._unsent.clear()
        self._end.close()

    def _read(self) -> bool:
        """Whether there may be more."""
        if self._end.fileno() < 0:
            return False
        try:
            data = self._end.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # it was killed with bytes of ours unread
            data = b""
        if not data:
            self._lose(None)
            return False
        self._reader.feed(data)
        try:
            while (message := self._reader.next()) is not None:
                self._on_message(message)
        except FrameError as error:
            self._lose(str(error))
            return False
        return True

    def _write(self) -> None:
        try:
            sent = self._end.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # nobody is there to read it; reading tells that
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._end.fileno())

    def _lose(self, reason: str | None) -> None:
        self.close()
        self._on_lost(reason)

"""Gives up on a connection whose client takes nothing of what was written to it, so that it holds nothing for ever.

When there is reason to watch is protocol.py's to know. Nothing runs, and no timer exists, while clients keep up.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_LOOKS = 4  # within the time that a client has: it is given up on after the whole of it and at most a quarter more
_BYTES_ACKED = struct.Struct("120xQ")  # within Linux' struct tcp_info: what the other side has taken, since the start


class WriteWatch:
    """Belongs to one connection. `seconds` without progress, and it is aborted: its requests see their client leave."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._every_seconds = seconds / _LOOKS
        self._seen: tuple[int, int] | None = None
        self._idle_looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Watch until everything that was written has left, or `end`. Costs nothing if it is watched already."""
        if self._timer is None:
            self._seen, self._idle_looks = self._progress(), 0
            self._timer = self._loop.call_later(self._every_seconds, self._look)

    def end(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pending(self) -> bool:
        """Whether something is still to be taken by the client, be it in our memory or in the kernel's."""
        return self._transport.get_write_buffer_size() > 0 or self._in_kernel_bytes() > 0

    def _look(self) -> None:
        self._timer = None
        if not self.pending():
            return
        progress = self._progress()
        self._idle_looks = self._idle_looks + 1 if progress == self._seen else 0
        self._seen = progress
        if self._idle_looks >= _LOOKS:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(self._every_seconds, self._look)

    def _progress(self) -> tuple[int, int]:
        """Return something that changes whenever the client takes a byte.

        Our buffer alone would not do: the kernel may hold some MiB in front of it, and TLS empties it in one go.
        """
        acked = 0
        with suppress(OSError, struct.error, AttributeError):  # another system than Linux: the buffer has to do
            info = self._socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
            (acked,) = _BYTES_ACKED.unpack(info)
        return acked, self._transport.get_write_buffer_size()

    def _in_kernel_bytes(self) -> int:
        with suppress(OSError):  # closed meanwhile
            unsent: int = struct.unpack("i", fcntl.ioctl(self._socket().fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            return unsent
        return 0

    def _socket(self) -> socket.socket:
        found: socket.socket = self._transport.get_extra_info("socket")
        return found

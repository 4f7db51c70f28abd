"""uvicorn's HTTP protocol, with our errors and with limits on heads and on clients that do not read.

`Connection` gives an answer access to its connection beyond ASGI.
"""

import asyncio
import fcntl
import re
import secrets
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Self

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError
from server.http.tls import Certificate
from server.settings import Settings

_MAX_HEAD_BYTES = 64 * 2**10
_MAX_PIPELINED = 64  # requests of one connection without an answer: each takes memory before its key is seen
_HEAD_SECONDS = 10.0  # from the connection, or a head's first byte, to its last
_LINGER_SECONDS = 1
# If an answer is complete before its request's body has come, the rest is read and dropped, within these limits: a
# close would be a reset, and the client, or a proxy before it, would not read the answer.
_BODY_LINGER_SECONDS = 30
_BODY_LINGER_BYTES = 64 * 2**20
# Longer than clients keep an idle connection (openai 5 s, aiohttp 15, nginx 60): a request that is sent while the
# server closes is lost.
_IDLE_SECONDS = 75
_LAST_WRITES_SECONDS = 2  # for connections whose client does not read, once everything else has ended
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=[ \t]*:)")

# No guessed types, no scripts, no referrer, no caches. Not among them: Cross-Origin-Resource-Policy (a chat page
# elsewhere shows our images by their links) and Strict-Transport-Security (it would bind other services on the same
# host; the owner of the name decides).
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # a link to an image is as good as the image
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}

_LOOKS = 4  # in `write_stall_seconds`: a client is aborted after that time, or up to a quarter later
_BYTES_ACKED = struct.Struct("120xQ")  # in Linux' struct tcp_info: bytes acknowledged since the start


def http_config(app: Any, settings: Settings, certificate: Certificate | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HearthProtocol,
        ws="none",  # WebSockets would bypass our middleware
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # uvicorn's default trusts these headers from this machine.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_WRITES_SECONDS,
    )


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name, which is in lower case; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


class Connection:
    """The connection of one request, in the request's scope."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._on_disconnect: Callable[[], None] | None = None

    @classmethod
    def of(cls, scope: Scope) -> Self:
        found: Self = scope["hearth.connection"]
        return found

    def write(self, data: bytes) -> None:
        """Send `data`, not empty, as the next chunk of a body that has begun. Only if `can_write`.

        It bypasses the middlewares' `send`, which change an answer's head only: that saves 1 us per token.
        """
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def can_write(self) -> bool:
        """Whether `write` may be called now; else use `send`, which may wait."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding and cycle.response_started and not cycle.flow.write_paused)

    def end_with_connection(self) -> None:
        """Let the body that follows end with its connection: HTTP/1.0 knows no chunks. Before an answer's head."""
        self._cycle.chunked_encoding, self._cycle.expected_content_length = False, sys.maxsize

    def last_comes(self, size: int) -> None:
        """Set how many bytes of a body are still to come, if uvicorn counts them."""
        if not self._cycle.chunked_encoding:
            self._cycle.expected_content_length = size

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Call `on_disconnect` when the client leaves; None ends that. The request's body must have been read."""
        self._on_disconnect = on_disconnect
        if on_disconnect is None:
            return
        if self._cycle.disconnected:
            self._loop.call_soon(on_disconnect)
        else:
            self._cycle.flow.resume_reading()  # a long body has paused reading, which notices a disconnect

    def client_left(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect()


class WriteWatch:
    """Aborts a connection whose client acknowledges no byte for `seconds` while something is written to it.

    A slow client that still reads a little is served to the end. (The kernel's TCP_USER_TIMEOUT would abort those with
    small receive buffers.)
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop = loop
        self._every_seconds = seconds / _LOOKS
        self._seen: tuple[int, int] | None = None
        self._idle_looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Watch until everything that was written is acknowledged, or until `end`. May be called again meanwhile."""
        if self._timer is None:
            self._seen, self._idle_looks = self._progress(), 0
            self._timer = self._loop.call_later(self._every_seconds, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pending(self) -> bool:
        """Whether bytes are unacknowledged, in our buffer or in the kernel's."""
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
        """Return values that change whenever the client acknowledges a byte.

        Our buffer's size is not enough: the kernel buffers some MiB, and TLS empties our buffer at once.
        """
        acked = 0
        with suppress(OSError, struct.error, AttributeError):  # not Linux: only the buffer is known
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
            (acked,) = _BYTES_ACKED.unpack(info)
        return acked, self._transport.get_write_buffer_size()

    def _in_kernel_bytes(self) -> int:
        with suppress(OSError):  # closed meanwhile
            unsent = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
            return int.from_bytes(unsent, sys.byteorder)
        return 0


class _LateClosing:
    """A transport whose first `close` waits if a body is still to be dropped; the second one closes."""

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]) -> None:
        self._transport = transport
        self._lingers = lingers
        self._closing = False
        self.write = transport.write  # for each token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        lingers = not self._closing and self._lingers()
        self._closing = True
        if not lingers:
            self._transport.close()


class _RefusedError(Exception):
    """Raised within the parser, which then ends the connection. The protocol's `_refusal` has the error to send."""


class HearthProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._refusal: ApiError | None = None
        self._in_head = True
        self._heads = 0  # complete ones
        self._head_bytes = 0  # of the head that is being read, as it came over the wire
        self._head_timer: asyncio.TimerHandle | None = None
        self._cycles: deque[Any] = deque()  # uvicorn remembers the newest request only
        self._body_came = False  # with the newest data
        self._tail_bytes = 0  # since the last piece of a body: trailers, which httptools would buffer
        self._dropped: int | None = None  # bytes of a body that came after the connection's last answer
        self._writes: WriteWatch

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport: Any = _LateClosing(transport, self._lingers)
        app: Any = self.config.app
        self._writes = WriteWatch(transport, self.loop, app.state.settings.write_stall_seconds)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._writes.end()
        self._disconnect_all()
        self._cycles.clear()  # they refer to this object, too
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, within limits: httptools would buffer a header of any length, before any key is checked."""
        if self._refused:
            return
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > _BODY_LINGER_BYTES:
                self._end_lingering()
                return
        self._body_came = False
        began_in_head, heads, idle = self._in_head, self._heads, self.timeout_keep_alive_task is not None
        super().data_received(_without_upgrade(data) if began_in_head else data)
        if self._refused:
            return
        if idle and self._heads == heads:  # an empty line ends the idle time too
            self._time_head()
        if began_in_head and self._in_head and self._heads == heads:  # all of `data` belongs to one head
            self._head_bytes += len(data)
        elif not self._in_head:
            self._tail_bytes = 0 if self._body_came else self._tail_bytes + len(data)
        if max(self._head_bytes, self._tail_bytes) > _MAX_HEAD_BYTES:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._time_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers of a chunked body come here, too, and are dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large (it may have come in one piece) or too many wait."""
        self._stop_timer()
        while self._cycles and self._cycles[0].response_complete:  # requests are answered in order
            self._cycles.popleft()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _MAX_HEAD_BYTES:
            self._refusal = _too_large()
        elif len(self._cycles) >= _MAX_PIPELINED:
            sentence = f"More than {_MAX_PIPELINED} requests wait on this connection. Open more, or wait for answers."
            self._refusal = ApiError(400, "too_many_pipelined", sentence)
        if self._refusal is not None:
            raise _RefusedError
        super().on_headers_complete()
        self._in_head = False
        self._heads += 1
        self._cycles.append(self.cycle)
        scope: Any = self.cycle.scope
        scope["hearth.connection"] = Connection(self.cycle, self.loop)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_came = True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = self._tail_bytes = 0
        if self._dropped is not None:
            self._end_lingering()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writes.begin()

    def resume_writing(self) -> None:
        self._writes.end()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Watch the client for the rest of an answer that was written in one piece."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._writes.begin()

    def timeout_keep_alive_handler(self) -> None:
        """Close once the client has read the last answer: TLS would drop the rest after 30 s."""
        if self.transport.is_closing() or not self._writes.pending():
            super().timeout_keep_alive_handler()
            return
        self._writes.begin()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's text is not ours
        self._refuse(self._refusal or ApiError(400, "invalid_http", "This is not a valid HTTP request."))

    def _lingers(self) -> bool:
        """Whether an answered request's body is still coming: it is then read, dropped by uvicorn, and closed after."""
        if self._refused or self._in_head or not self.cycle.response_complete:
            return False
        self._dropped = 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # the client may go on sending
            self.transport.write_eof()
        self._stop_timer()
        self._head_timer = self.loop.call_later(_BODY_LINGER_SECONDS, self._end_lingering)
        return True

    def _end_lingering(self) -> None:
        self._refused = True  # nothing that comes now is read
        self._stop_timer()
        self.transport.close()

    def _time_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _disconnect_all(self) -> None:
        """Mark all requests of this connection as disconnected, also those behind the newest."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            Connection.of(cycle.scope).client_left()

    def _refuse(self, error: ApiError) -> None:
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        self._disconnect_all()
        self._refused = True
        self._stop_timer()
        if begun:  # the client would take the error for a part of the answer
            self.transport.close()
            return
        own = {"Connection": "close", "x-request-id": f"req_{secrets.token_hex(12)}"}
        error.headers.update(own | SECURITY_HEADERS)
        response = error.response()
        head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        phrase = HTTPStatus(error.status).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %b\r\n" % (error.status, phrase) + head + b"\r\n" + bytes(response.body))
        # A close at once, with bytes of the client unread, would be a reset, which loses the answer.
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _without_upgrade(data: bytes) -> bytes:
    """Rename the header `Upgrade` (Java's `h2c`): we speak HTTP/1.1 only, and the parser would drop the body."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if b"\r\nupgrade" not in head.lower():
        return data  # as nearly all do: without a copy of the body
    return _UPGRADE.sub(b"x-upgrade", head) + data[len(head) :]


def _too_large() -> ApiError:
    return ApiError(431, "headers_too_large", "Address and headers are larger than 64 KiB. Send less.")

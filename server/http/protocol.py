"""How uvicorn speaks HTTP here: its protocol with limits on heads and on clients that take nothing, and our errors.

`Connection` is what an answer may know and do of its connection beside ASGI.
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
# A body whose request is answered before it has come is read on and dropped, for so long and so much of it: closed
# upon it, the connection would end in a reset, and the client, or a proxy before it, would not read the answer.
_BODY_LINGER_SECONDS = 30
_BODY_LINGER_BYTES = 64 * 2**20
# Longer than others keep one for their next request (openai's client 5 s, aiohttp 15, nginx 60): the side that closes
# first may close upon a request that is on its way, and that one is lost.
_IDLE_SECONDS = 75
_LAST_WRITES_SECONDS = 2  # for connections whose client does not read, once everything else has ended
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=[ \t]*:)")

# To guess nothing, run nothing, and pass nothing on. Not among them: Cross-Origin-Resource-Policy (a chat page
# elsewhere shows our images by their links) and Strict-Transport-Security (it would bind other services on the same
# host; the owner of the name decides).
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # a link to an image is as good as the image
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}

_LOOKS = 4  # within the time that a client has: it is aborted after the whole of it and at most a quarter more
_BYTES_ACKED = struct.Struct("120xQ")  # within Linux' struct tcp_info: what the other side has taken, since the start


def http_config(app: Any, settings: Settings, certificate: Certificate | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HearthProtocol,
        ws="none",  # it would pass by our middleware
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Its own default believes whatever is sent from this machine.
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
        """Send `data`, which is not empty, as the next piece of a body that has begun and goes on, if `can_write`.

        Past what middlewares make of `send`, who look at an answer's head only: 1 us for each token.
        """
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def can_write(self) -> bool:
        """Whether `write` may be called now; if not, `send` has to, which may wait."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding and cycle.response_started and not cycle.flow.write_paused)

    def end_with_connection(self) -> None:
        """Let the body that follows end with its connection: HTTP/1.0 knows no chunks. Before an answer's head."""
        self._cycle.chunked_encoding, self._cycle.expected_content_length = False, sys.maxsize

    def last_comes(self, size: int) -> None:
        """Say how many bytes are still to come of a body, where uvicorn counts them."""
        if not self._cycle.chunked_encoding:
            self._cycle.expected_content_length = size

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Call it once the client has left; None: nothing. The body of the request must have been read."""
        self._on_disconnect = on_disconnect
        if on_disconnect is None:
            return
        if self._cycle.disconnected:
            self._loop.call_soon(on_disconnect)
        else:
            self._cycle.flow.resume_reading()  # a long body has paused it, and what does not read notices nothing

    def client_left(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect()


class WriteWatch:
    """Aborts a connection whose client takes no byte of what was written for `seconds`. Belongs to one connection.

    By what the client has acknowledged: a slow client that goes on taking a little is served to its end. (The kernel's
    TCP_USER_TIMEOUT would abort those with small receive buffers.)
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
        """Watch until everything that was written has left, or `end`. Costs nothing if it is watched already."""
        if self._timer is None:
            self._seen, self._idle_looks = self._progress(), 0
            self._timer = self._loop.call_later(self._every_seconds, self._look)

    def end(self) -> None:
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
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
            (acked,) = _BYTES_ACKED.unpack(info)
        return acked, self._transport.get_write_buffer_size()

    def _in_kernel_bytes(self) -> int:
        with suppress(OSError):  # closed meanwhile
            unsent = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
            return int.from_bytes(unsent, sys.byteorder)
        return 0


class _LateClosing:
    """A transport whose `close` first asks whether a body is still to be dropped, and is called again then."""

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
    """Raised within the parser, which then gives up on the connection. Why stands in the protocol's `_refusal`."""


class HearthProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._refusal: ApiError | None = None
        self._in_head = True
        self._heads = 0  # that are complete
        self._head_bytes = 0  # of the head that is being read, as it came over the wire
        self._head_timer: asyncio.TimerHandle | None = None
        self._cycles: deque[Any] = deque()  # uvicorn remembers the newest request only
        self._body_came = False  # with the newest data
        self._tail_bytes = 0  # since a body's last piece: trailers, which httptools would keep
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
        """Read, within limits: httptools would keep a header of any length in memory, before any key is seen."""
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
        if idle and self._heads == heads:  # an empty line has ended the idle time, too
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
        """Keep a header. What comes after a chunked body looks like one too, and is dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large (it may have come in one piece) or too many wait."""
        self._stop_timer()
        while self._cycles and self._cycles[0].response_complete:  # they are answered in their order
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
        """Give the client its time for what is left of an answer, which was written in one piece and waits for it."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._writes.begin()

    def timeout_keep_alive_handler(self) -> None:
        """Close, but not before the client has taken the last answer: TLS would drop what is left after 30 s."""
        if self.transport.is_closing() or not self._writes.pending():
            super().timeout_keep_alive_handler()
            return
        self._writes.begin()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's text is not ours
        self._refuse(self._refusal or ApiError(400, "invalid_http", "This is not a valid HTTP request."))

    def _lingers(self) -> bool:
        """Read the rest of an answered request's body, if it is still coming: uvicorn drops it, and we close then."""
        if self._refused or self._in_head or not self.cycle.response_complete:
            return False
        self._dropped = 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # who sends on need not
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
        """Nothing more is written to any request of this connection, also of those behind the newest."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            Connection.of(cycle.scope).client_left()

    def _refuse(self, error: ApiError) -> None:
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        self._disconnect_all()
        self._refused = True
        self._stop_timer()
        if begun:  # within an answer this would be taken for a part of it
            self.transport.close()
            return
        own = {"Connection": "close", "x-request-id": f"req_{secrets.token_hex(12)}"}
        error.headers.update(own | SECURITY_HEADERS)
        response = error.response()
        head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        phrase = HTTPStatus(error.status).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %b\r\n" % (error.status, phrase) + head + b"\r\n" + bytes(response.body))
        # Closed at once, with bytes of the client still unread, the answer would be lost in a reset.
        if self.transport.can_write_eof():  # TLS cannot say it
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _without_upgrade(data: bytes) -> bytes:
    """Hide an offer of another protocol: we speak HTTP/1.1 only, but the parser would drop the body (Java's `h2c`)."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if b"\r\nupgrade" not in head.lower():
        return data  # as nearly all do: without a copy of the body
    return _UPGRADE.sub(b"x-upgrade", head) + data[len(head) :]


def _too_large() -> ApiError:
    return ApiError(431, "headers_too_large", "Address and headers are larger than 64 KiB. Send less.")

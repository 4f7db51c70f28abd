"""The load generator's side of HTTP: one keep-alive connection that notes when each piece of an answer arrived.

Cheap on purpose, because it shares the machine with what it measures: what a stream brings is kept as it was read, and
looked at when somebody asks what it was (stream_reads.py); those who measure speed ask after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from benchmarks.errors import BenchError
from benchmarks.stream_reads import StreamReads

_SHOWN_BYTES = 300
_LONGEST_SECONDS = 600.0


class AnswerError(BenchError):
    """The server's answer was no success; the message shows it."""


@dataclass(slots=True)
class Answer:
    """One answer; times are `time.perf_counter`'s."""

    started: float
    finished: float = 0.0
    status: int = 0
    streamed: bool = False
    body: bytes = b""  # of a plain answer
    reads: StreamReads = field(default_factory=StreamReads)  # of a streamed one
    retry_after: bytes | None = None  # the header of that name

    @property
    def text_times(self) -> list[float]:
        """When each piece of text arrived; empty unless it was streamed."""
        return self.reads.text_times if self.streamed else []

    def check_status(self) -> None:
        """Raise `AnswerError` unless it is a success, as far as its head says."""
        if self.status != 200:
            self.completion_tokens()

    def completion_tokens(self) -> int:
        """Return how many tokens it has by the server's own count.

        Raises `AnswerError` unless the answer is a complete success.
        """
        last = self.reads.last if self.streamed else self.body
        if self.status == 200 and (self.reads.done or not self.streamed):
            try:
                content: Any = msgspec.json.decode(last.removeprefix(b"data:"))
                return int(content["usage"]["completion_tokens"])
            except (msgspec.DecodeError, KeyError, TypeError):
                pass
        shown = last[:_SHOWN_BYTES].decode(errors="replace").strip()
        raise AnswerError(f"the answer had status {self.status} and no complete usage. It says: {shown or 'nothing'}")


class Connection(asyncio.Protocol):
    """A keep-alive connection for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer = Answer(0.0)
        self._chunked = self._closes = False
        self._in_chunks = False  # of a stream: read, and not parsed
        self._ended = False

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connect. Raises `AnswerError`."""
        try:
            _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        except OSError as error:
            raise AnswerError(f"cannot connect to {host} port {port}: {error.strerror or error}") from error
        return connection

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Answer:
        """Send a whole request and return its answer, whatever its status. Raises `AnswerError` if it breaks off."""
        if self._transport is None:
            raise AnswerError("the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self._ended = False
        self._transport.write(request)
        try:
            async with asyncio.timeout(_LONGEST_SECONDS):
                return await self._waiter
        except TimeoutError:
            raise AnswerError(f"the answer had no end for {_LONGEST_SECONDS:.0f} s") from None

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(f"the server closed the connection before the answer was complete ({exc or 'no error'})")

    def data_received(self, data: bytes) -> None:
        if self._ended:
            self.close()  # nobody has asked for it
            return
        answer = self._answer
        answer.finished = time.perf_counter()
        answer.reads.add(answer.finished, data)
        if not self._in_chunks:
            self._parse(data)
        elif answer.reads.end():
            self._parser = httptools.HttpResponseParser(self)  # the other has not seen the end of this one
            self._end()

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._answer.streamed = value.startswith(b"text/event-stream")
            case b"transfer-encoding":
                self._chunked = value.lower() == b"chunked"
            case b"retry-after":
                self._answer.retry_after = value

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self._closes = not self._parser.should_keep_alive()
        self._in_chunks = self._answer.streamed and self._chunked

    def on_body(self, body: bytes) -> None:
        if not self._answer.streamed:
            self._answer.body += body

    def on_message_complete(self) -> None:
        self._end()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server does not speak HTTP/1.1 here ({error})")
            self.close()

    def _end(self) -> None:
        self._ended = True
        self._in_chunks = self._chunked = False
        if not self._answer.streamed:
            self._answer.reads = StreamReads()
        if self._closes:
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)

    def _fail(self, message: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(AnswerError(message))

"""The load generator's side of HTTP: one keep-alive connection that notes when each piece of text arrived.

Cheap on purpose, because it shares the machine with what it measures: httptools parses, and an event is looked at
with one regular expression.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from benchmarks.errors import BenchError

_EVENT_END = re.compile(rb"\n\r?\n")
# A chunk whose delta holds text. The role chunk that some servers send first has an empty one.
_TEXT = re.compile(rb'"content":\s*"[^"]')
_USAGE = re.compile(rb'"usage":\s*\{')
_SHOWN_BYTES = 300


class AnswerError(BenchError):
    """The server's answer was no success; the message shows it."""


@dataclass(slots=True)
class Answer:
    """One answer. `text_times` are empty unless it was streamed; times are `time.perf_counter`'s."""

    started: float
    finished: float = 0.0
    status: int = 0
    streamed: bool = False
    text_times: list[float] = field(default_factory=list)
    body: bytes = b""  # all of a plain answer; of a stream, the last event that is neither text nor [DONE]
    done: bool = False
    retry_after: bytes | None = None  # the header of that name

    def completion_tokens(self) -> int:
        """Return how many tokens it has by the server's own count.

        Raises `AnswerError` unless the answer is a complete success.
        """
        if self.status == 200 and (self.done or not self.streamed):
            try:
                content: Any = msgspec.json.decode(self.body.removeprefix(b"data:"))
                return int(content["usage"]["completion_tokens"])
            except (msgspec.DecodeError, KeyError, TypeError):
                pass
        shown = self.body[:_SHOWN_BYTES].decode(errors="replace").strip()
        raise AnswerError(f"the answer had status {self.status} and no complete usage. It says: {shown or 'nothing'}")


class Connection(asyncio.Protocol):
    """A keep-alive connection for one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer = Answer(0.0)
        self._text = b""
        self._now = 0.0

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
        self._text = b""
        self._transport.write(request)
        return await self._waiter

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
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server does not speak HTTP/1.1 here ({error})")
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._answer.streamed = value.startswith(b"text/event-stream")
        elif name.lower() == b"retry-after":
            self._answer.retry_after = value

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._answer.streamed:
            self._answer.body += body
            return
        *events, self._text = _EVENT_END.split(self._text + body)
        for event in events:
            self._take(event)

    def on_message_complete(self) -> None:
        self._answer.finished = self._now
        if not self._parser.should_keep_alive():
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)

    def _take(self, event: bytes) -> None:
        if _TEXT.search(event):
            self._answer.text_times.append(self._now)
        elif event.startswith(b"data: [DONE]"):
            self._answer.done = True
        elif _USAGE.search(event) or b'"error"' in event:
            self._answer.body = event

    def _fail(self, message: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(AnswerError(message))

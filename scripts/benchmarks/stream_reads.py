"""What was read of one streamed answer, byte for byte with its moments, and what it was once somebody asks."""

from __future__ import annotations

import re
from typing import Any

import httptools

_EVENT_END = re.compile(rb"\n\r?\n")
# A chunk whose delta holds text. The role chunk that some servers send first has an empty one.
_TEXT = re.compile(rb'"content":\s*"[^"]')
_USAGE = re.compile(rb'"usage":\s*\{')
# How a body in chunks ends; none of the servers sends trailers.
_END = b"\r\n0\r\n\r\n"


class StreamReads:
    """One answer in chunks, head included. Looked at once, when it is complete."""

    __slots__ = ("_looked", "_reads", "_times")

    def __init__(self) -> None:
        self._times: list[float] = []
        self._reads: list[bytes] = []
        self._looked: _Look | None = None

    def add(self, moment: float, data: bytes) -> None:
        """Keep what was read at that moment of `time.perf_counter`."""
        self._times.append(moment)
        self._reads.append(data)

    def end(self) -> bool:
        """Whether the last read was the end of the answer."""
        last = self._reads[-1]
        return (last if len(last) >= len(_END) else b"".join(self._reads[-len(_END) :])).endswith(_END)

    @property
    def text_times(self) -> list[float]:
        """When each event with text arrived."""
        return self._look().text_times

    @property
    def last(self) -> bytes:
        """The last event that is neither text nor the end marker."""
        return self._look().last

    @property
    def done(self) -> bool:
        """Whether the end marker came."""
        return self._look().done

    def _look(self) -> _Look:
        if self._looked is None:
            self._looked = _Look(self._times, self._reads)
            self._times, self._reads = [], []
        return self._looked


class _Look:
    """Called by httptools for each piece of the body."""

    def __init__(self, times: list[float], reads: list[bytes]) -> None:
        self.text_times: list[float] = []
        self.last = b""
        self.done = False
        self._begun = b""  # of an event
        parser: Any = httptools.HttpResponseParser(self)
        try:
            for self._moment, data in zip(times, reads, strict=True):
                parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError:
            pass  # what comes after is lost, the end marker too: that is no success

    def on_body(self, body: bytes) -> None:
        *events, self._begun = _EVENT_END.split(self._begun + body)
        for event in events:
            self._take(event)

    def _take(self, event: bytes) -> None:
        if _TEXT.search(event):
            self.text_times.append(self._moment)
        elif event.startswith(b"data: [DONE]"):
            self.done = True
        elif _USAGE.search(event) or b'"error"' in event:
            self.last = event

"""One JSON line per request, written off the event loop: what happened, never the prompt or the answer."""

import asyncio
import logging
import math
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from engine import ChatResult, ChatStep, Usage
from server.errors import ApiError
from server.validation import own_path

_log = logging.getLogger("hearth.server")
_LONGEST_HEADER = 2048
_PATH_LENGTH = 100
_SECRET = re.compile(r"hk_[^/]*|[\w+-]{32,}", re.ASCII)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request; routes fill it in. `key` is the public id only."""

    request_id: str
    method: str
    client: str | None
    started: float = field(default_factory=time.monotonic)
    route: str | None = None
    key: str | None = None
    model: str | None = None
    stream: bool | None = None
    status: int | None = None
    path: str | None = None  # where no route matched
    error_code: str | None = None
    error_status: int | None = None  # the code's, even if the answer began with 200; not logged
    param: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    time_to_first_token_seconds: float | None = None
    finish_reason: str | None = None
    items: int | None = None
    failed_items: int | None = None
    images: int | None = None
    audio_seconds: float | None = None
    ignored_tools: list[str] | None = None
    queued_at: float | None = None  # when its first answer began to wait for its turn, by time.monotonic(); not logged
    dispatched_at: float | None = None  # and when its turn came; not logged
    headers: dict[str, str] = field(default_factory=dict)  # of the answer, beyond what the route says; not logged

    def refused(self, error: ApiError) -> None:
        """Note the error that is the answer, or ends it. Of `param`, a field's path, only our own words are kept."""
        self.error_code, self.error_status = error.code, error.status
        self.param = error.limit or own_path(error.param)
        self.model = error.model or self.model

    def routed(self, route: str | None, path: str) -> None:
        """Note the route, or else the path: escaped, cut, without what may be a key."""
        self.route = route
        if route is None:
            self.path = quote(_SECRET.sub("***", path), safe="/*")[:_PATH_LENGTH]

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def ignored(self, place: str, word: str) -> None:
        """Note a tool that was left out: its place in the body, and our word for its type or `other`."""
        named = place if word == "other" else f"{place}.type={word}"
        before = self.headers.get("x-hearth-ignored")
        if before is None or len(before) < _LONGEST_HEADER:
            self.ignored_tools = [*(self.ignored_tools or ()), word]
            self.headers["x-hearth-ignored"] = named if before is None else f"{before}, {named}"

    def first_token(self) -> None:
        """Note the time of the first token, once."""
        if self.time_to_first_token_seconds is None:
            self.time_to_first_token_seconds = round(self.seconds(), 4)

    def used(self, usage: Usage) -> None:
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens

    def streamed(self, last: ChatStep | None) -> None:
        """Note the last step of a streamed answer, if there was one."""
        if last is not None:
            self.used(last.usage)
            self.finish_reason = last.deltas[-1].finish_reason if last.deltas else None

    def answered(self, result: ChatResult) -> None:
        self.used(result.usage)
        self.finish_reason = result.choices[0].finish_reason

    def line(self) -> str:
        """Return the request's line. Call when the request has ended."""
        known = zip(_LOGGED, _values_of(self), strict=True)
        line: dict[str, Any] = {"time": round(time.time(), 3)}
        line.update({name: value for name, value in known if value is not None})
        line["duration_seconds"] = round(self.seconds(), 4)
        return msgspec.json.encode(line).decode()


_NOT_LOGGED = frozenset({"started", "error_status", "queued_at", "dispatched_at", "headers"})
_LOGGED = tuple(name for name in RequestRecord.__slots__ if name not in _NOT_LOGGED)
_values_of = attrgetter(*_LOGGED)


class _LinesFile(RotatingFileHandler):
    _warned_at = -math.inf

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802  # logging's names
        """Log the failure once a minute; logging would print the lines with a trace, ten times a second."""
        if time.monotonic() - self._warned_at > 60:
            self._warned_at = time.monotonic()
            _log.warning("The access log cannot be written (%s): lines are lost. Is the disk full?", sys.exc_info()[1])


class AccessLog:
    """Writes to `folder`/access.jsonl (64 MiB, four old ones kept), up to 0.1 s after a request's end.

    Belongs to the event loop that runs. Close it at the end: a process that is killed loses the last lines.
    """

    def __init__(self, folder: Path, *, file_bytes: int = 64 * 2**20) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # set-up may have made it, readable by all
        self._file = _LinesFile(folder / "access.jsonl", maxBytes=file_bytes, backupCount=4, encoding="utf-8")
        self._thread = ThreadPoolExecutor(1, "access-log")  # one write after the other
        self._loop = asyncio.get_running_loop()
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def append(self, record: RequestRecord) -> None:
        """Write the line of a request that has ended. Never waits or fails."""
        self._lines.append(record.line())
        if self._timer is None:
            # Lines are written together: a thread that is woken for each of them takes the event loop's time.
            self._timer = self._loop.call_later(0.1, self._flush)

    def close(self) -> None:
        """Write what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._flush()
        self._thread.shutdown()
        self._file.close()

    def _flush(self) -> None:
        self._timer = None
        lines, self._lines = self._lines, []
        self._thread.submit(self._write, lines)

    def _write(self, lines: list[str]) -> None:
        self._file.handle(logging.makeLogRecord({"msg": "\n".join(lines)}))

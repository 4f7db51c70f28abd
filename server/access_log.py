"""One JSON line per request, written off the event loop. Holds what happened, never what was said."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass, field
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from engine import ChatResult, Usage

_FILE_BYTES = 64 * 2**20
_FILES_KEPT = 4
_log = logging.getLogger("hearth.access")


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request; routes fill in what they learn. `key` is the public id only."""

    request_id: str
    method: str
    client: str | None
    started: float = field(default_factory=time.monotonic)
    route: str | None = None
    key: str | None = None
    model: str | None = None
    stream: bool | None = None
    status: int | None = None
    error_code: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    time_to_first_token_seconds: float | None = None
    finish_reason: str | None = None
    items: int | None = None
    failed_items: int | None = None
    images: int | None = None
    audio_seconds: float | None = None
    headers: dict[str, str] = field(default_factory=dict)  # of the answer, beyond what the route says; not logged

    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.started

    def first_token(self) -> None:
        """Note the time of the first token, once."""
        if self.time_to_first_token_seconds is None:
            self.time_to_first_token_seconds = round(time.monotonic() - self.started, 4)

    def used(self, usage: Usage) -> None:
        """Note the tokens of the answer so far."""
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens

    def answered(self, result: ChatResult) -> None:
        """Note a whole answer."""
        self.used(result.usage)
        self.finish_reason = result.choices[0].finish_reason

    def write(self) -> None:
        """Write the line. Call once, when the request has ended."""
        line: dict[str, Any] = {"time": round(time.time(), 3)}
        line.update(
            (name, value)
            for name in self.__slots__
            if name not in {"started", "headers"} and (value := getattr(self, name)) is not None
        )
        line["duration_seconds"] = round(self.seconds(), 4)
        _log.info(msgspec.json.encode(line).decode())


def open_access_log(folder: Path) -> QueueListener:
    """Write access lines to `folder`/access.jsonl (64 MiB, four old ones kept). Stop the listener at the end."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # set-up may have made it, for everybody to read
    file = RotatingFileHandler(folder / "access.jsonl", maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT)
    file.setFormatter(logging.Formatter("%(message)s"))
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    _log.handlers = [QueueHandler(lines)]
    _log.propagate = False
    _log.setLevel(logging.INFO)
    listener = QueueListener(lines, file)
    listener.start()
    return listener

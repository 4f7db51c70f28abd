"""An outlet (engine.process.protocol.py) for services that are tried without a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from engine import EngineError


class Recorder:
    """Keeps what it is told, events read as `kind`; `when_polled` is called between the steps of long work."""

    def __init__(self, kind: Any) -> None:
        self.events: dict[int, list[Any]] = {}
        self.ends: dict[int, EngineError | None] = {}
        self.when_polled: Callable[[], None] = lambda: None
        self._kind = kind

    def event(self, job: int, payload: object) -> None:
        assert job not in self.ends
        self.events.setdefault(job, []).append(msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=self._kind))

    def done(self, job: int) -> None:
        assert job not in self.ends
        self.ends[job] = None

    def failed(self, job: int, error: EngineError) -> None:
        assert job not in self.ends
        self.ends[job] = error

    def poll(self) -> None:
        self.when_polled()

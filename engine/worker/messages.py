"""Everything that the server's process and a worker say to each other. How it travels is frames.py's.

Payloads, options and info are the service's own language (engine/images/messages.py, for one): opaque here.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message. `service` is `"module:function"`, imported in the child only (service.py: `Open`)."""

    service: str
    options: bytes


class Submit(msgspec.Struct, frozen=True, tag=True):
    job: int
    payload: bytes


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the job any more; it still gets its one `Done` or `Failed`."""

    job: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a `Pong`, which comes between two pieces of work."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End at the next chance. Jobs that run are dropped."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    phase: str
    progress: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: bytes


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded as configured. `message` is a `LoadError`'s, in our words."""

    message: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


class Event(msgspec.Struct, frozen=True, tag=True):
    job: int
    payload: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    job: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job ended without its answer. `message` is an `EngineError`'s, in our words."""

    job: int
    kind: Literal["request", "generation", "overloaded"]
    message: str
    param: str | None = None
    retry_after_seconds: int | None = None


ToChild = Load | Submit | Cancel | Ping | Shutdown
ToParent = Loading | Ready | LoadFailed | Pong | Event | Done | Failed

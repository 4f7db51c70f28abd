"""Everything that the server's process and a worker say to each other, and how it becomes bytes: never a pickle.

A frame is the length of a message in four bytes, big-endian, then msgpack. Options, info, jobs and events are the
service's own language (backends/diffusers/protocol.py, for one): encoded here with the rest, and kept as they came
(`msgspec.Raw`) for the one who knows their types.
"""

from typing import Any, Generic, Literal, TypeVar

import msgspec

_T = TypeVar("_T")


class Load(msgspec.Struct, Generic[_T], frozen=True, tag=True):
    """The first message. `service` is `"module:function"`, imported in the child only (service.py: `Open`)."""

    service: str
    options: _T


class Submit(msgspec.Struct, Generic[_T], frozen=True, tag=True):
    job: int
    payload: _T


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The job is not wanted any more; it still gets its one `Done` or `Failed`."""

    job: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a `Pong`, which comes between two pieces of work."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End at the next chance. Jobs that run are dropped."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    phase: str
    progress: float


class Ready(msgspec.Struct, Generic[_T], frozen=True, tag=True):
    info: _T


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded as configured. `message` is a `LoadError`'s, in our words."""

    message: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


class Event(msgspec.Struct, Generic[_T], frozen=True, tag=True):
    job: int
    payload: _T


class Done(msgspec.Struct, frozen=True, tag=True):
    job: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job ended without its answer. `message` is an `EngineError`'s, in our words."""

    job: int
    kind: Literal["request", "generation", "overloaded"]
    message: str
    param: str | None = None
    retry_after_seconds: int | None = None


ToChild = Load[_T] | Submit[_T] | Cancel | Ping | Shutdown
ToParent = Loading | Ready[_T] | LoadFailed | Pong | Event[_T] | Done | Failed
# As they are read
FromParent = ToChild[msgspec.Raw]
FromChild = ToParent[msgspec.Raw]


MAX_FRAME_BYTES = 64 * 2**20
_HEADER_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """Bytes that are no message, or a message that is longer than a frame may be."""


def to_frame(message: ToChild[Any] | ToParent[Any]) -> bytearray:
    """Return the frame of `message`; raises `FrameError` if it is longer than `MAX_FRAME_BYTES`."""
    frame = bytearray(_HEADER_BYTES)
    _encoder.encode_into(message, frame, _HEADER_BYTES)
    size = len(frame) - _HEADER_BYTES
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {size} bytes is longer than the {MAX_FRAME_BYTES} bytes of a frame")
    frame[:_HEADER_BYTES] = size.to_bytes(_HEADER_BYTES, "big")
    return frame


class FrameReader(Generic[_T]):
    """Takes bytes as they come and gives messages of `kinds`, a union of tagged structs."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what came."""
        self._buffer += data

    def next(self) -> _T | None:
        """Return the next message, None if it is not complete; raises `FrameError`, and then no other follows."""
        if len(self._buffer) < _HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
        if size > MAX_FRAME_BYTES:
            raise FrameError(f"a frame says that it is {size} bytes long")
        end = _HEADER_BYTES + size
        if len(self._buffer) < end:
            return None
        try:
            with memoryview(self._buffer)[_HEADER_BYTES:end] as content:
                message = self._decoder.decode(bytes(content))  # a copy, into which a `msgspec.Raw` may point
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FrameError("a frame is no message") from error
        del self._buffer[:end]
        return message

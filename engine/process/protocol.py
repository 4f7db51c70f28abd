"""The messages between the server's process and a worker, their encoding, and the interface of a service in a worker.

A frame is the length of a message in four bytes, big-endian, then msgpack: never a pickle. Options, jobs and
events have the service's own types (like `ImageJob` in types.py): they are encoded here with the rest, and stay encoded
(`msgspec.Raw`) for the reader that knows their types.
"""

from collections.abc import Iterator
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import msgspec

from engine.errors import EngineError, GenerationError, OverloadedError, RequestError

_T = TypeVar("_T")


class Load(msgspec.Struct, Generic[_T], frozen=True, tag=True):
    """The first message. `service` is `"module:function"`, imported in the child only.

    The function takes the encoded options, an `Outlet` and a `Report`; it returns a `Service`, or raises `LoadError`.
    """

    service: str
    options: _T


class Submit(msgspec.Struct, Generic[_T], frozen=True, tag=True):
    job: int
    payload: _T


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The job is not wanted any more; it still ends with one `Done` or `Failed`."""

    job: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a `Pong`, which comes between two pieces of work."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End at the next chance. Jobs that run are dropped."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    phase: str
    progress: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded as configured. `message` is a `LoadError`'s, in our words.

    `passing`: the next try may succeed, and the message is a `StartError`'s.
    """

    message: str
    passing: bool = False


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

    @classmethod
    def of(cls, job: int, error: EngineError) -> Self:
        if isinstance(error, RequestError):
            return cls(job, "request", error.message, param=error.param)
        if isinstance(error, OverloadedError):
            return cls(job, "overloaded", error.message, retry_after_seconds=error.retry_after_seconds)
        return cls(job, "generation", error.message)

    def error(self) -> EngineError:
        if self.kind == "request":
            return RequestError(self.message, param=self.param)
        if self.kind == "overloaded":
            return OverloadedError(self.message, retry_after_seconds=self.retry_after_seconds or 1)
        return GenerationError(self.message)


ToChild = Load[_T] | Submit[_T] | Cancel | Ping | Shutdown
ToParent = Loading | Ready | LoadFailed | Pong | Event[_T] | Done | Failed
# As they are read
FromParent = ToChild[msgspec.Raw]
FromChild = ToParent[msgspec.Raw]


MAX_FRAME_BYTES = 64 * 2**20
_HEADER_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """Bytes that are not a message, or a message that is longer than a frame may be."""


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
    """Decodes bytes, as they arrive, to messages of `kinds`, a union of tagged structs."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def read(self, data: bytes) -> Iterator[_T]:
        """Yield the messages that are complete now. After a `FrameError` no message follows."""
        self._buffer += data
        while len(self._buffer) >= _HEADER_BYTES:
            size = int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame says that it is {size} bytes long")
            end = _HEADER_BYTES + size
            if len(self._buffer) < end:
                return
            try:
                with memoryview(self._buffer)[_HEADER_BYTES:end] as content:
                    message = self._decoder.decode(bytes(content))  # a copy, into which a `msgspec.Raw` may point
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise FrameError("a frame is not a message") from error
            del self._buffer[:end]
            yield message


class ShutdownRequested(BaseException):  # like KeyboardInterrupt it is not for `except Exception`
    """The child must end now. Raised by `poll`, and by a send to a parent that has ended."""


class Outlet(Protocol):
    """How a service answers. Each job ends once, by `done` or `failed`; later calls for it are dropped."""

    def event(self, job: int, payload: object) -> None:
        """Send the parent a part of the answer, which msgspec can encode.

        Raises `GenerationError` if it is longer than a frame (64 MiB).
        """

    def done(self, job: int) -> None:
        """The answer is complete, or was cancelled."""

    def failed(self, job: int, error: EngineError) -> None:
        """There is no answer. The class of `error` says whose fault that is; its message goes to the client."""

    def poll(self) -> None:
        """Act on messages that came meanwhile; raises `ShutdownRequested`. Call it between the steps of long work.

        It calls `submit` and `cancel`.
        """


class Service(Protocol):
    """A loaded model that works on any number of jobs, a bounded piece of work at a time.

    child.py drives it, in the child's main thread.
    """

    def submit(self, job: int, payload: msgspec.Raw) -> None:
        """Decode and queue the job. If this raises, the job is not queued: an `EngineError` is its answer."""

    def cancel(self, job: int) -> None:
        """Drop a job that has not ended. The service calls `done` or `failed` for it now or in a later step."""

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do; if not, the child sleeps until a message comes."""

    def step(self) -> None:
        """Do one bounded piece of work for the jobs there are.

        An `EngineError`, or memory running out, fails all jobs (each is cancelled, and its end ignored) and the
        service goes on. Any other exception ends the process.
        """

"""How a message becomes bytes and back: its length in four bytes, big-endian, then msgpack. Never a pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from engine.worker.messages import ToChild, ToParent

MAX_FRAME_BYTES = 64 * 2**20
_HEADER_BYTES = 4
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """Bytes that are no message, or a message that is longer than a frame may be."""


def to_frame(message: ToChild | ToParent) -> bytearray:
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
        """Return the next message, None if it is not whole yet; raises `FrameError`, and then nothing more is."""
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
                message = self._decoder.decode(content)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FrameError("a frame holds no message") from error
        del self._buffer[:end]
        return message

"""Sound in requests: decoded in a process of its own, without its silence, in pieces for a model.

This file has the messages of both processes: reading.py is the server's half, service.py the other.
"""

import msgspec

RATE_HZ = 16_000


class Piece(msgspec.Struct, frozen=True):
    """`samples` are 16-bit numbers in the machine's order, beginning `start` seconds into the file."""

    start: float
    samples: bytes

    @property
    def seconds(self) -> float:
        return len(self.samples) / 2 / RATE_HZ


class SoundOptions(msgspec.Struct, frozen=True):
    """The file, and how long a piece, and all of it, may be."""

    path: str
    piece_seconds: float
    most_seconds: float


class SoundEvent(msgspec.Struct, frozen=True):
    """The next piece, if there is one, and how much of the sound has been read. The last event is `complete`."""

    seconds: float
    piece: Piece | None = None
    complete: bool = False

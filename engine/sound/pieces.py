"""Cuts sound into pieces while it is decoded: silence is dropped, and what is too long is cut where it is quiet.

A model that hears silence writes words that nobody said. Samples are 16-bit, mono, at `RATE_HZ`.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.sound.types import RATE_HZ, Piece

_FRAME = RATE_HZ // 50
# Louder than the first is sound, quieter than the second silence. Between them sound is what is so much louder than the
# quiet tenth of the last half minute.
_SOUND_DB, _SILENCE_DB, _ABOVE_QUIET_DB = -45.0, -65.0, 6.0
_QUIET_SHARE, _REMEMBERED_FRAMES = 0.1, 1500
# Of silence so much ends a piece, and so much is kept before and after what is heard. Of sound less is a click.
_PAUSE_FRAMES, _KEPT_FRAMES, _CLICK_FRAMES = 75, 10, 4
# A piece that is too long is cut in the second half, at the quietest of all spans of so many frames.
_CUT_FRAMES = 10


class Cutter:
    """Gets the sound of one file in its order. No piece is longer than `most_seconds`."""

    def __init__(self, most_seconds: float) -> None:
        self._most = int(most_seconds * RATE_HZ) // _FRAME  # in frames, like all that follows
        self._first = 0  # where in the file the kept sound begins
        self._samples = np.zeros(0, np.int16)  # kept: what no piece has been made of, whole frames and a rest
        self._levels = np.zeros(0, np.float32)  # of its whole frames, in dB of full scale
        self._loud = np.zeros(0, np.bool_)
        self._goes_on = False  # what was cut in its middle: its end is no click, however short
        self._remembered: deque[float] = deque(maxlen=_REMEMBERED_FRAMES)

    @property
    def seconds(self) -> float:
        return self._first * _FRAME / RATE_HZ + len(self._samples) / RATE_HZ

    def add(self, samples: NDArray[np.int16]) -> Iterator[Piece]:
        """Yield the pieces that are complete now."""
        self._samples = np.concatenate([self._samples, samples])
        known, whole = len(self._levels), len(self._samples) // _FRAME
        frames = self._samples[known * _FRAME : whole * _FRAME].reshape(-1, _FRAME).astype(np.float32)
        levels = 10 * np.log10(np.maximum(np.mean(frames**2, axis=1) / 2**30, 1e-12)).astype(np.float32)
        self._remembered.extend(levels.tolist())
        self._levels = np.concatenate([self._levels, levels])
        self._loud = np.concatenate([self._loud, levels > self._threshold()])
        while (piece := self._next(last=False)) is not None:
            yield piece

    def end(self) -> Iterator[Piece]:
        """Yield what is left."""
        rest = -len(self._samples) % _FRAME
        length = self.seconds
        if rest and len(self._samples):
            yield from self.add(np.zeros(rest, np.int16))
        while (piece := self._next(last=True)) is not None:
            most = round((length - piece.start) * RATE_HZ) * 2
            yield Piece(piece.start, piece.samples[:most])

    def _threshold(self) -> float:
        if not self._remembered:
            return _SOUND_DB
        quiet = float(np.quantile(np.array(self._remembered), _QUIET_SHARE))
        return min(max(quiet + _ABOVE_QUIET_DB, _SILENCE_DB), _SOUND_DB)

    def _next(self, *, last: bool) -> Piece | None:
        """Return the next piece; None where there is none before more sound has come."""
        while True:
            loud = np.flatnonzero(self._loud)
            if not len(loud):
                self._drop(len(self._loud) - (0 if last else _KEPT_FRAMES))
                return None
            self._drop(int(loud[0]) - _KEPT_FRAMES)
            loud = np.flatnonzero(self._loud)
            pauses = np.flatnonzero(np.diff(loud) > _PAUSE_FRAMES)
            heard = loud if not len(pauses) else loud[: int(pauses[0]) + 1]
            is_over = bool(len(pauses)) or last or len(self._loud) - int(loud[-1]) > _PAUSE_FRAMES
            end = int(heard[-1]) + 1 + _KEPT_FRAMES
            if end > self._most:
                self._goes_on = True
                return self._taken(self._quietest())
            if not is_over:
                return None
            is_sound, self._goes_on = len(heard) >= _CLICK_FRAMES or self._goes_on, False
            if is_sound:
                return self._taken(min(end, len(self._loud)))
            self._drop(int(heard[-1]) + 1)

    def _quietest(self) -> int:
        """Return where to cut what is longer than a piece may be."""
        begin = self._most // 2
        levels = self._levels[begin : self._most]
        span = min(_CUT_FRAMES, len(levels))
        sums = np.convolve(levels, np.ones(span, np.float32), "valid")
        return begin + int(sums.argmin()) + span // 2 or 1

    def _taken(self, frames: int) -> Piece:
        piece = Piece(self._first * _FRAME / RATE_HZ, self._samples[: frames * _FRAME].tobytes())
        self._drop(frames)
        return piece

    def _drop(self, frames: int) -> None:
        if frames > 0:
            self._first += frames
            self._samples = self._samples[frames * _FRAME :]
            self._levels, self._loud = self._levels[frames:], self._loud[frames:]

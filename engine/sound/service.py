"""Decodes one sound file and cuts it into pieces, in a process of its own, which a hostile file may kill.

FFmpeg's parsers, in C, read it. The process has little memory beside what it starts with, a bound on its CPU time, and
a list of formats, none of which leads to other files.
"""

import logging
import resource
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import LoadError, RequestError
from engine.process.child import confine
from engine.process.protocol import Outlet, Service
from engine.sound import RATE_HZ, Piece, SoundEvent, SoundOptions
from engine.types import Report

_DEMUXERS = "aac,aiff,amr,asf,caf,flac,matroska,webm,mov,mp3,ogg,wav,w64"
_MEMORY_BYTES = 512 * 2**20
_CPU_SECONDS = 60.0
_FASTER_THAN_SOUND = 20  # at least, on one core
# After so much sound without a piece the caller is told the progress.
_REPORT_SECONDS = 300.0
_STEP_SECONDS = 1.0
_RATES_HZ = range(4_000, 768_001)
_MOST_DAMAGED = 1000  # packets


def open_service(options: bytes, outlet: Outlet, _report: Report) -> Service:
    """Open the file. Raises `LoadError` with a sentence for clients."""
    asked = msgspec.msgpack.decode(options, type=SoundOptions)
    cpu_seconds = int(_CPU_SECONDS + asked.most_seconds / _FASTER_THAN_SOUND)
    confine(_MEMORY_BYTES, (resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_FSIZE, 0))
    logging.getLogger("libav").setLevel(logging.CRITICAL)  # it would log what a client has sent
    return SoundService(outlet, asked)


class SoundService:
    """A `Service` (process/protocol.py): a job is the question for the next piece."""

    def __init__(self, outlet: Outlet, asked: SoundOptions) -> None:
        self._outlet = outlet
        self._events = events_of(asked)
        self._job: int | None = None
        self._kept: SoundEvent | None = next(self._events)  # a file that is not sound is refused now

    def submit(self, job: int, _payload: bytes) -> None:
        self._job = job

    def cancel(self, job: int) -> None:
        self._job = None
        self._outlet.done(job)

    @property
    def busy(self) -> bool:
        return self._job is not None

    def step(self) -> None:
        job, event = self._job, self._kept
        if job is None:
            return
        self._kept = None
        try:
            event = event or next(self._events)
        except LoadError as error:
            self._outlet.failed(job, RequestError(error.message, param="file"))
        else:
            self._outlet.event(job, event)
            self._outlet.done(job)
        self._job = None


def events_of(asked: SoundOptions) -> Iterator[SoundEvent]:
    """Yield the pieces of a file, and the progress in between. Raises `LoadError` with a sentence for clients."""
    cutter, reported = Cutter(asked.piece_seconds), 0.0
    for samples in _samples(Path(asked.path)):
        for piece in cutter.add(samples):
            reported = cutter.seconds
            yield SoundEvent(reported, piece)
        if cutter.seconds > asked.most_seconds:
            most = f"{asked.most_seconds:g} s"
            raise LoadError(f"The recording is longer than {most}, which this model takes at most. Cut it.")
        if cutter.seconds - reported > _REPORT_SECONDS:
            reported = cutter.seconds
            yield SoundEvent(reported)
    for piece in cutter.end():
        yield SoundEvent(cutter.seconds, piece)
    yield SoundEvent(cutter.seconds, complete=True)


def _samples(path: Path) -> Iterator[NDArray[np.int16]]:
    """Yield the sound in parts of about a second, for `Cutter`. Damaged parts are left out."""
    parts: list[NDArray[np.int16]] = []
    size = total = 0
    resampler = _Resampler()
    try:
        for frame in _frames(path):
            made = resampler.take(frame)
            parts += made
            size += sum(map(len, made))
            if size >= _STEP_SECONDS * RATE_HZ:
                yield np.concatenate(parts)
                total, size, parts = total + size, 0, []
        parts += resampler.take(None)
    except MemoryError as error:
        raise _unreadable() from error
    except (av.FFmpegError, ValueError, OSError) as error:
        if not total and not parts:
            raise _unreadable() from error
    if parts:
        yield np.concatenate(parts)
    elif not total:
        raise _unreadable()


def _frames(path: Path) -> Iterator[Any]:
    """Yield what FFmpeg decodes of the first sound in a file. Raises its errors, also if too much is damaged."""
    options, damaged = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "file"}, 0
    with av.open(f"file:{path}", options=options, metadata_errors="replace") as container:
        if not container.streams.audio:
            raise _unreadable()
        for packet in container.demux(container.streams.audio[0]):
            try:
                yield from packet.decode()
            except av.FFmpegError:
                damaged += 1
                if damaged > _MOST_DAMAGED:
                    raise


class _Resampler:
    """Makes 16 kHz mono of frames, even if their format changes."""

    def __init__(self) -> None:
        self._form: Any = None
        self._resampler: Any = None

    def take(self, frame: Any) -> list[NDArray[np.int16]]:
        """Return the resampled frame, as far as it is complete; for None, the rest."""
        made: list[NDArray[np.int16]] = []
        if frame is None:
            return [] if self._resampler is None else _arrays(self._resampler.resample(None))
        form = (frame.format.name, frame.layout.name, frame.sample_rate)
        if frame.sample_rate not in _RATES_HZ:
            raise _unreadable()
        if form != self._form:
            made = self.take(None)
            self._form, self._resampler = form, av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
        frame.pts = None  # gaps that a file claims are not filled
        return made + _arrays(self._resampler.resample(frame))


def _arrays(frames: list[Any]) -> list[NDArray[np.int16]]:
    return [frame.to_ndarray()[0] for frame in frames if frame.samples]


def _unreadable() -> LoadError:
    return LoadError("The file cannot be read as sound. Send a recording as WAV, FLAC, OGG, MP3, M4A or WebM.")


_FRAME = RATE_HZ // 50
# Above the first level all is sound, below the second all is silence. Between them, sound is louder by the third than
# the quietest tenth of the last half minute.
_SOUND_DB, _SILENCE_DB, _ABOVE_QUIET_DB = -45.0, -65.0, 6.0
_QUIET_SHARE, _REMEMBERED_FRAMES = 0.1, 1500
# So much silence ends a piece, and so much is kept before and after sound. Sound that is shorter is a click.
_PAUSE_FRAMES, _KEPT_FRAMES, _CLICK_FRAMES = 75, 10, 4
# A piece that is too long is cut in the second half, at the quietest of all spans of so many frames.
_CUT_FRAMES = 10


class Cutter:
    """Cuts sound into pieces: silence is dropped, and long sound is cut where it is quiet.

    A model that gets silence writes words that nobody said. Takes the sound of one file in order, in 16-bit samples,
    mono, at `RATE_HZ`. No piece is longer than `most_seconds`.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most = int(most_seconds * RATE_HZ) // _FRAME  # in frames, like all that follows
        self._first = 0  # where in the file the kept sound begins
        self._samples = np.zeros(0, np.int16)  # not in a piece yet: whole frames and a rest
        self._levels = np.zeros(0, np.float32)  # of its whole frames, in dB of full scale
        self._loud = np.zeros(0, np.bool_)
        self._goes_on = False  # the sound was cut in its middle: its end is not a click, however short
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
        """Return the next piece; None if it needs more sound."""
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
        """Return where to cut sound that is too long for a piece."""
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

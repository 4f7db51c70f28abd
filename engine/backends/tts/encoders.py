"""Encodes speech as it is made: what is new of one file, piece by piece, so that the pieces together play without gaps.

The mark says that a model spoke, where the format has a place for it: not in AAC (ADTS), and PCM is bare samples.
"""

from __future__ import annotations

import io
import os
import struct
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import soundfile
import soxr

from engine.voices.types import AudioFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# https://www.iptc.org/std/photometadata/specification/ : Digital Source Type
_MARK = "AI-generated speech; http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"

PCM_HZ = 24_000  # what OpenAI's clients take for granted
_OPUS_HZ = 48_000
# Rates that MPEG audio knows. Source: ISO/IEC 11172-3 and 13818-3 (layer III), 14496-3 (AAC).
_MP3_HZ = (16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_AAC_BITS_PER_SECOND = 64_000
# Of libsndfile's scale from 0 (most bits) to 1: 80 kbit/s up to 24 kHz, 160 kbit/s above. Constant, because a stream
# has no table of contents from which a player could tell the length of a variable one.
_MP3_COMPRESSION = 0.5
_UNKNOWN_LENGTH = 0xFFFFFFFF


class Encoder(Protocol):
    """One file. `add` takes mono float samples and returns the file's next bytes, possibly none; `last` ends it."""

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        """Encode."""


def encoder_for(audio_format: AudioFormat, rate: int, *, mark: bool) -> Encoder:
    """Return an encoder of samples at `rate` Hz, which makes a file of that rate where the format knows it."""
    if audio_format == "wav":
        return _Wav(rate, mark=mark)
    if audio_format == "flac":
        return _Sndfile("FLAC", "PCM_16", rate, mark=mark)
    if audio_format == "pcm":
        return _resampled(rate, PCM_HZ, lambda _rate: _Pcm())
    if audio_format == "opus":
        return _resampled(rate, _OPUS_HZ, lambda hz: _Sndfile("OGG", "OPUS", hz, mark=mark))
    known = next((hz for hz in _MP3_HZ if hz >= rate), _MP3_HZ[-1])
    if audio_format == "aac":
        return _resampled(rate, known, _Aac)
    return _resampled(rate, known, lambda hz: _Sndfile("MP3", "MPEG_LAYER_III", hz, mark=mark))


class AllAtOnce:
    """Keeps everything until the end, so that the file's header can say how long it is."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._kept: list[NDArray[np.float32]] = []

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        self._kept.append(samples)
        return self._encoder.add(np.concatenate(self._kept), last=True) if last else b""


def _resampled(rate: int, wanted: int, make: Callable[[int], Encoder]) -> Encoder:
    return make(wanted) if wanted == rate else _Resampled(rate, wanted, make(wanted))


class _Resampled:
    """Changes the rate of one continuous stream, without a seam between its pieces."""

    def __init__(self, rate: int, wanted: int, encoder: Encoder) -> None:
        self._stream = soxr.ResampleStream(rate, wanted, 1, dtype="float32")
        self._encoder = encoder

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        return self._encoder.add(self._stream.resample_chunk(samples, last=last), last=last)


class _Pcm:
    """Bare samples, 16 bits, little-endian."""

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:  # noqa: ARG002  # it has no end
        return _int16(samples).tobytes()


class _Wav:
    """The same behind a header, which says the length if everything comes at once."""

    def __init__(self, rate: int, *, mark: bool) -> None:
        self._rate, self._mark = rate, mark
        self._begun = False

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        data = _int16(samples).tobytes()
        if self._begun:
            return data
        self._begun = True
        return self._header(len(data) if last else None) + data

    def _header(self, length: int | None) -> bytes:
        """Source: Multimedia Programming Interface and Data Specifications 1.0 (RIFF), 1991."""
        chunks = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, self._rate, 2 * self._rate, 2, 16)
        if self._mark:
            comment = _MARK.encode() + b"\0" * (2 - len(_MARK) % 2)
            chunks += b"LIST" + struct.pack("<I", 12 + len(comment)) + b"INFO"
            chunks += b"ICMT" + struct.pack("<I", len(comment)) + comment
        whole = _UNKNOWN_LENGTH if length is None else 4 + len(chunks) + 8 + length
        data = _UNKNOWN_LENGTH if length is None else length
        return b"RIFF" + struct.pack("<I", whole) + b"WAVE" + chunks + b"data" + struct.pack("<I", data)


class _Sndfile:
    """What libsndfile encodes. If everything comes at once its header is complete, else the length is left open."""

    def __init__(self, container: str, coding: str, rate: int, *, mark: bool) -> None:
        mp3 = {"compression_level": _MP3_COMPRESSION, "bitrate_mode": "CONSTANT"} if container == "MP3" else {}
        self._outgoing = _Outgoing()
        self._file: Any = soundfile.SoundFile(
            self._outgoing, "w", samplerate=rate, channels=1, format=container, subtype=coding, **mp3
        )
        if mark:
            self._file.comment = _MARK

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        self._file.write(np.clip(samples, -1, 1))
        if last:
            self._file.close()
        return self._outgoing.take()


class _Aac:
    """AAC in ADTS frames, by FFmpeg."""

    def __init__(self, rate: int) -> None:
        import av

        self._av: Any = av
        self._rate = rate
        self._sent = _Outgoing()
        # Without flush_packets FFmpeg would keep up to 32 KiB to itself.
        self._container: Any = av.open(self._sent, "w", format="adts", container_options={"flush_packets": "1"})
        self._stream: Any = self._container.add_stream("aac", rate=rate, layout="mono")
        self._stream.bit_rate = _AAC_BITS_PER_SECOND

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        if len(samples):
            planes = np.ascontiguousarray(np.clip(samples, -1, 1)[np.newaxis])
            frame = self._av.AudioFrame.from_ndarray(planes, format="fltp", layout="mono")
            frame.sample_rate = self._rate
            self._container.mux(self._stream.encode(frame))
        if last:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._sent.take()


class _Outgoing(io.RawIOBase):
    """A file in memory that forgets what was taken: later corrections of that part (of a header) are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._taken_bytes = 0
        self._data = bytearray()
        self._position = 0

    def take(self) -> bytes:
        """Return what is new."""
        data = bytes(self._data)
        self._taken_bytes += len(data)
        self._data.clear()
        return data

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        end = self._taken_bytes + len(self._data)
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: end}[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def write(self, data: Any, /) -> int:
        new = memoryview(data).cast("B")
        late = max(0, self._taken_bytes - self._position)
        if late < len(new):
            start = self._position + late - self._taken_bytes
            self._data[start : start + len(new) - late] = new[late:]
        self._position += len(new)
        return len(new)

    def readinto(self, _buffer: Any, /) -> int:
        return 0


def _int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2")

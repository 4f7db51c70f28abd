"""Stretches speech to a speed, and encodes it while it is made, with FFmpeg: one encoder per file.

The mark of AI-made audio is set if the format has a place for it: AAC (ADTS) and PCM have none.
"""

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from engine.voices.types import AudioFormat

# https://www.iptc.org/std/photometadata/specification/ : Digital Source Type
_MARK = "AI-generated speech; http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
# Rates that MPEG audio knows. Source: ISO/IEC 11172-3 and 13818-3 (layer III), 14496-3 (AAC).
_MPEG_HZ = (16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
# Constant bit rate: without an index, which a stream cannot have, players cannot tell the length of a variable one.
_MP3_BITS_PER_SECOND, _MP3_BITS_PER_SECOND_ABOVE_24_KHZ = 80_000, 160_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coding:
    """A format in FFmpeg's terms. `rates`: those of the format, in Hz; empty if it takes any."""

    container: str
    codec: str
    rates: tuple[int, ...] = ()
    bits_per_second: int | None = None
    codec_options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)


_CODINGS: dict[AudioFormat, _Coding] = {
    "mp3": _Coding(container="mp3", codec="libmp3lame", rates=_MPEG_HZ, bits_per_second=_MP3_BITS_PER_SECOND),
    "opus": _Coding(
        container="ogg",
        codec="libopus",
        rates=(48_000,),
        bits_per_second=64_000,
        codec_options={"vbr": "constrained"},
        container_options={"page_duration": "100000"},  # microseconds; a whole second would come late
    ),
    "aac": _Coding(container="adts", codec="aac", rates=_MPEG_HZ, bits_per_second=64_000),
    "flac": _Coding(container="flac", codec="flac", container_options={"metadata_header_padding": "0"}),
    "wav": _Coding(container="wav", codec="pcm_s16le"),
    "pcm": _Coding(container="s16le", codec="pcm_s16le", rates=(24_000,)),  # what OpenAI's clients take for granted
}


class _Stream(io.BytesIO):
    """A file that is sent while it is made: FFmpeg cannot seek back to write the length at the beginning."""

    def seekable(self) -> bool:
        return False


class Encoder:
    """One file. What is added is mono, at `rate` Hz; the file has that rate, or the next that its format knows.

    `whole` keeps everything until the end, so that the file's header has the length.
    """

    def __init__(self, audio_format: AudioFormat, rate: int, *, mark: bool, whole: bool = False) -> None:
        self._coding = _CODINGS[audio_format]
        self._rate = rate
        self._mark = mark
        self._whole = whole
        self._kept: list[NDArray[np.float32]] = []
        self._output: io.BytesIO | None = None

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        """Return the file's next bytes, possibly none; `last` ends it."""
        if self._whole:
            self._kept.append(samples)
            if not last:
                return b""
            samples = np.concatenate(self._kept)
        if self._output is None:
            self._output = io.BytesIO() if last else _Stream()
            self._open(self._output)
        if len(samples):
            frame = _frame(np.clip(samples, -1, 1), self._rate)
            self._container.mux(self._stream.encode(frame))  # resampled on the way
        if last:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        data = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return data

    def _open(self, output: io.BytesIO) -> None:
        coding = self._coding
        rate = next((hz for hz in coding.rates if hz >= self._rate), (self._rate, *coding.rates)[-1])
        # Without flush_packets FFmpeg would hold back up to 32 KiB.
        options = {"flush_packets": "1", **coding.container_options}
        self._container: Any = av.open(output, "w", format=coding.container, container_options=options)
        if self._mark:
            self._container.metadata["comment"] = _MARK
        self._stream: Any = self._container.add_stream(coding.codec, rate, layout="mono", options=coding.codec_options)
        if coding.codec == "libmp3lame" and rate > 24_000:
            self._stream.bit_rate = _MP3_BITS_PER_SECOND_ABOVE_24_KHZ
        elif coding.bits_per_second is not None:
            self._stream.bit_rate = coding.bits_per_second


def stretch(parts: list[NDArray[np.float32]], rate: int, speed: float) -> NDArray[np.float32]:
    """Return `parts` of one sound (mono) as one, exactly 1/`speed` as long, at the same pitch."""
    samples = np.concatenate([np.zeros(0, np.float32), *parts], dtype=np.float32)
    length = round(len(samples) / speed)
    if speed == 1:
        return samples
    # One atempo filter takes 0.5 to 2, so two are chained. They keep the last samples back: silence is added for that.
    halves = [("atempo", str(math.sqrt(speed)))] * 2
    made = [frame.to_ndarray()[0] for frame in _filtered(np.pad(samples, (0, rate // 2)), rate, halves)]
    return np.concatenate([*made, np.zeros(length, np.float32)])[:length]


_LUFS = -20.0  # of every voice that says nothing of it itself
_SHORTEST_SECONDS = 0.4  # what has a loudness


def gain(samples: NDArray[np.float32], rate: int) -> np.float32:
    """Return the factor that makes a sound as loud as all voices."""
    return np.float32(10 ** ((_LUFS - loudness_lufs(samples, rate)) / 20))


def loudness_lufs(samples: NDArray[np.float32], rate: int) -> float:
    """Return the integrated loudness of a mono sound (ITU-R BS.1770), with silence behind one that is too short."""
    padded = np.pad(samples, (0, max(0, math.ceil(_SHORTEST_SECONDS * rate) - len(samples))))
    told = [frame.metadata for frame in _filtered(padded, rate, [("ebur128", "metadata=1:framelog=quiet")])]
    return next(float(one["lavfi.r128.I"]) for one in reversed(told) if one)  # a last short frame has none


def _filtered(samples: NDArray[np.float32], rate: int, filters: Sequence[tuple[str, str]]) -> Iterator[Any]:
    """Yield the frames that FFmpeg's filters, each with its options, make of a mono sound."""
    graph: Any = av.filter.Graph()
    source = graph.add_abuffer(format="flt", layout="mono", sample_rate=rate, time_base=Fraction(1, rate))
    graph.link_nodes(source, *(graph.add(*one) for one in filters), graph.add("abuffersink")).configure()
    graph.push(_frame(samples, rate))
    graph.push(None)
    with contextlib.suppress(EOFError):
        while True:
            yield graph.pull()


def _frame(samples: NDArray[np.float32], rate: int) -> Any:
    frame: Any = av.AudioFrame.from_ndarray(samples[np.newaxis], format="flt", layout="mono")
    frame.sample_rate = rate
    return frame

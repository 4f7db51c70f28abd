"""Stretches speech to a speed, and encodes it as it is made: one encoder from a file's beginning to its end, by FFmpeg.

The mark says that a model spoke, where the format has a place for it: not in AAC (ADTS), and PCM is bare samples.
"""

import io
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from engine.voices.types import AudioFormat

# https://www.iptc.org/std/photometadata/specification/ : Digital Source Type
_MARK = "AI-generated speech; http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
# Rates that MPEG audio knows. Source: ISO/IEC 11172-3 and 13818-3 (layer III), 14496-3 (AAC).
_MPEG_HZ = (16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
# Constant, because a stream has no table of contents from which a player could tell the length of a variable one.
_MP3_BITS_PER_SECOND, _MP3_BITS_PER_SECOND_ABOVE_24_KHZ = 80_000, 160_000
_FRAME_SECONDS = 0.03  # more than one period of the lowest voices
_SEARCH_SECONDS = 0.008


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coding:
    """A format in FFmpeg's words. `rates`: those that the format knows, in Hz; empty where it takes any."""

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


class _Output(io.BytesIO):
    """What FFmpeg has written. Only in a file that comes whole may it go back, to say the length at the beginning."""

    def __init__(self, *, complete: bool) -> None:
        super().__init__()
        self._complete = complete

    def seekable(self) -> bool:
        return self._complete

    def take(self) -> bytes:
        """Return what is new."""
        data = self.getvalue()
        self.seek(0)
        self.truncate()
        return data


class Encoder:
    """One file. What is added is mono, at `rate` Hz; the file has that rate, or the next that its format knows.

    `whole` keeps everything until the end, so that the file's header can say how long it is.
    """

    def __init__(self, audio_format: AudioFormat, rate: int, *, mark: bool, whole: bool = False) -> None:
        self._coding = _CODINGS[audio_format]
        self._rate = rate
        self._mark = mark
        self._whole = whole
        self._kept: list[NDArray[np.float32]] = []
        self._output: _Output | None = None

    def add(self, samples: NDArray[np.float32], *, last: bool) -> bytes:
        """Return the file's next bytes, possibly none; `last` ends it."""
        if self._whole:
            self._kept.append(samples)
            if not last:
                return b""
            samples = np.concatenate(self._kept)
        if self._output is None:
            self._output = _Output(complete=last)
            self._open(self._output)
        if len(samples):
            frame: Any = av.AudioFrame.from_ndarray(np.clip(samples, -1, 1)[np.newaxis], format="flt", layout="mono")
            frame.sample_rate = self._rate
            self._container.mux(self._stream.encode(frame))  # resampled on the way
        if last:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._output.take()

    def _open(self, output: _Output) -> None:
        coding = self._coding
        rate = next((hz for hz in coding.rates if hz >= self._rate), (self._rate, *coding.rates)[-1])
        # Without flush_packets FFmpeg would keep up to 32 KiB to itself.
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
    """Return `parts` of one sound (mono) as one, in 1/`speed` of their length, to a sample, at the same pitch.

    For runtimes whose own control of speed is not exact. WSOLA. Source: W. Verhelst and M. Roelands, "An overlap-add
    technique based on waveform similarity (WSOLA) for high quality time-scale modification of speech", ICASSP 1993.
    """
    samples = np.concatenate([np.zeros(0, np.float32), *parts], dtype=np.float32)
    length = round(len(samples) / speed)
    hop = round(rate * _FRAME_SECONDS / 2)
    search = round(rate * _SEARCH_SECONDS)
    if speed == 1 or len(samples) <= 2 * hop:
        return samples[:length] if speed > 1 else np.pad(samples, (0, length - len(samples)))
    window = np.hanning(2 * hop + 1)[:-1].astype(np.float32)  # half-overlapping copies of it add up to 1
    frames = -(-length // hop) + 1
    source = np.pad(samples, (hop + search, 3 * hop + search + round(hop * speed)))
    made = np.zeros((frames + 1) * hop, np.float32)
    wanted = source[search : search + 2 * hop]
    for frame in range(frames):
        near = min(round(frame * hop * speed), len(samples) + search)
        start = near + _best_match(source[near : near + 2 * hop + 2 * search], wanted)
        made[frame * hop : frame * hop + 2 * hop] += window * source[start : start + 2 * hop]
        wanted = source[start + hop : start + 3 * hop]
    return made[hop : hop + length]


def _best_match(region: NDArray[np.float32], wanted: NDArray[np.float32]) -> int:
    """Where in `region` the sound goes on most like `wanted`: a cut there is not heard."""
    likeness = np.correlate(region, wanted, "valid")
    energy = np.cumsum(np.concatenate(([0.0], region.astype(np.float64) ** 2)))
    loudness = energy[len(wanted) :] - energy[: -len(wanted)]
    return int(np.argmax(likeness / np.sqrt(loudness + 1e-9)))

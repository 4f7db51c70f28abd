"""What tests of voices and speech share: the nine voices, a decoder that is not ours, and how high a voice is."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import yaml
from demo_models.build import RECIPES
from numpy.typing import NDArray

if TYPE_CHECKING:
    import httpx2

    Samples = NDArray[np.float32]

SPEECH, VOICES, SPEECH_MODELS = "/v1/audio/speech", "/v1/audio/voices", "/v1/audio/models"
VOICE_MODEL = "service-voice"
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
PCM_RATE = 24_000
# As the interface document counts them: language -> (females, males)
COUNTS = {"am": (2, 1), "so": (1, 1), "ti": (0, 1), "om": (0, 1), "en": (1, 1)}
NINE = {
    "selam": ("female", "am"),
    "hana": ("female", "am"),
    "dawit": ("male", "am"),
    "hodan": ("female", "so"),
    "warsame": ("male", "so"),
    "berhane": ("male", "ti"),
    "tolosa": ("male", "om"),
    "emma": ("female", "en"),
    "james": ("male", "en"),
}
TEXTS = {
    "am": "ሰላም። እንዴት ነህ?",
    "so": "Subax wanaagsan.",
    "ti": "ሰላም፡ ከመይ ኣለኹም።",
    "om": "Akkam jirtu?",
    "en": "Good morning, this is only a demo.",
}
SENTENCE = "This is only a demo, and it goes on for a while. "
LONGEST = (SENTENCE * 100)[:4096]
HELLO_EMMA: dict[str, Any] = {"model": VOICE_MODEL, "voice": "emma", "input": "Good morning.", "seed": 7}
CAST = yaml.safe_load((RECIPES / "voices/cast.yaml").read_text("utf-8"))
# In the middle of a sentence, as measured; and of the demo voices, as they were trained
PITCHES_HZ = {"selam": 216, "hana": 255, "dawit": 112, "hodan": 225, "warsame": 98, "berhane": 131, "tolosa": 120}
PITCHES_HZ |= {"emma": 215, "james": 105}
TONES_HZ = {voice["id"]: voice["pitch_hz"] for model in CAST["models"] for voice in model["voices"]}


async def spoken(http: httpx2.AsyncClient, **fields: Any) -> bytes:
    """The whole file for a short request with these fields."""
    response = await http.post(SPEECH, json=HELLO_EMMA | fields)
    assert response.status_code == 200, response.text
    return response.content


def decoded(data: bytes, kind: str) -> tuple[int, Samples]:
    """The rate and the one channel of an audio file, as PyAV (FFmpeg) reads it."""
    if kind == "pcm":
        return PCM_RATE, np.frombuffer(data, "<i2").astype(np.float32) / 2**15
    with av.open(io.BytesIO(data)) as file:
        (stream,) = file.streams.audio
        assert stream.channels == 1
        names = {"opus": "opus", "mp3": "mp3float", "aac": "aac", "flac": "flac", "wav": "pcm_s16le"}
        assert stream.codec_context.name == names[kind]
        resampler = av.AudioResampler("flt", "mono", stream.rate)
        frames = [made for frame in file.decode(stream) for made in resampler.resample(frame)]
        frames += resampler.resample(None)
        return stream.rate, np.concatenate([frame.to_ndarray()[0] for frame in frames])


def seconds(data: bytes, kind: str) -> float:
    rate, samples = decoded(data, kind)
    return len(samples) / rate


def pitch_hz(rate: int, samples: Samples) -> float:
    """The median over its loud frames of how often a voice repeats itself in a second."""
    size = rate // 10
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    loudness = np.sqrt((frames**2).mean(axis=1))
    found = []
    for frame in frames[loudness > loudness.max() / 3]:
        spectrum = np.fft.rfft(frame - frame.mean(), 2 * size)
        likeness = np.fft.irfft(np.abs(spectrum) ** 2)[:size] / (size - np.arange(size))
        first, last = rate // 400, rate // 60
        best = likeness[first:last].max()
        lag = first + int(np.argmax(likeness[first:last] > 0.9 * best))
        while likeness[lag + 1] > likeness[lag]:  # up to the top of this peak
            lag += 1
        found.append(rate / lag)
    return float(np.median(found))


def speech_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, comments left out."""
    assert data.endswith(b"\n\n")
    blocks = data.decode().removesuffix("\n\n").split("\n\n")
    assert all(block == ": keep-alive" or (block.startswith("data: ") and "\n" not in block) for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block != ": keep-alive"]

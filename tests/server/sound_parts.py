"""What tests of transcription share: sound files, spoken by the server itself or made here. No tests."""

from __future__ import annotations

import importlib.util
import io
import wave
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx2
    from numpy.typing import NDArray

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MODEL, VOICE = "service-transcription", "service-voice"
RATE = 16_000

needs_espeak = pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None,
    reason="eSpeak NG, whose voices say words, is not installed: ./scripts/setup without --no-espeak",
)


async def spoken(http: httpx2.AsyncClient, text: str, voice: str = "emma", kind: str = "wav") -> bytes:
    body = {"model": VOICE, "voice": voice, "input": text, "response_format": kind}
    answer = await http.post("/v1/audio/speech", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.content


async def heard(http: httpx2.AsyncClient, sound: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> Any:
    """Post a form, with `response_format` verbose_json if nothing else is said, and return the answer's JSON."""
    form = {"model": MODEL, "response_format": "verbose_json", **fields}
    answer = await http.post(path, data=form, files={"file": ("sound", sound)}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wav(samples: NDArray[np.float64]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((np.clip(samples, -1, 1) * (2**15 - 1)).astype("<i2").tobytes())
    return file.getvalue()


def samples_of(sound: bytes) -> NDArray[np.float64]:
    """Return the samples of a WAV file at 16 kHz, near enough for a recogniser."""
    with wave.open(io.BytesIO(sound)) as reader:
        rate, data = reader.getframerate(), reader.readframes(reader.getnframes())
    given = np.frombuffer(data, "<i2") / 2**15
    return np.interp(np.arange(0, len(given) / rate, 1 / RATE), np.arange(len(given)) / rate, given)


def one_after_another(sounds: Sequence[bytes], pause_seconds: float) -> NDArray[np.float64]:
    """Return them in a row, with pauses between."""
    pause = np.zeros(int(pause_seconds * RATE))
    return np.concatenate([part for sound in sounds for part in (samples_of(sound), pause)])

"""Speaks with Piper's voices (X.onnx and X.onnx.json), through the package piper-tts where it is installed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import LoadError
from engine.weights.safety import read_config

_log = logging.getLogger(__name__)

# The other types of phonemes make Piper download models of their own, or need packages that it does not bring.
_PHONEMES = ("espeak", "text")
_FRAME_SECONDS = 0.03  # more than one period of the lowest voices
_SEARCH_SECONDS = 0.008


def load(folder: Path) -> PiperSpeech:
    """Raises `LoadError` without the package, and for a folder that is incomplete or not understood."""
    try:
        import piper
        from piper.config import SynthesisConfig
    except ImportError as error:
        raise LoadError("Piper's voices need the package piper-tts: pip install piper-tts") from error
    config = next(iter(sorted(folder.glob("*.onnx.json"))), None)
    if config is None or not config.with_suffix("").is_file():
        raise LoadError(f"{folder.name} holds no pair of X.onnx and X.onnx.json. Finish the download.")
    phonemes = read_config(config).get("phoneme_type", "espeak")
    if phonemes not in _PHONEMES:
        raise LoadError(f"{folder.name} needs phonemes of type {phonemes!r}; only {' and '.join(_PHONEMES)} work here.")
    try:
        voice = piper.PiperVoice.load(config.with_suffix(""), config, download_dir=folder)
    except Exception as error:
        # onnxruntime's errors share no class but this one.
        _log.exception("piper could not load %s", folder.name)
        raise LoadError(
            f"{folder.name} cannot be loaded ({type(error).__name__}; the log has the details). Check that the "
            "download is complete."
        ) from error
    return PiperSpeech(folder.name, voice, SynthesisConfig)


class PiperSpeech:
    """A `Synthesizer` (families.py)."""

    def __init__(self, name: str, voice: Any, settings: Any) -> None:
        self.sample_rate: int = voice.config.sample_rate
        self._name = name
        self._voice = voice
        self._settings = settings

    def sayable(self, text: str) -> str:
        """As `Synthesizer.sayable`; [[ ]] would make Piper read phonemes."""
        text = text.replace("[[", "[").replace("]]", "]")
        return text if any(map(str.isalnum, text)) and any(self._voice.phonemize(text)) else ""

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:  # noqa: ARG002
        """As `Synthesizer.speak`. Without noise, since what an ONNX session draws cannot be seeded per call."""
        settings = self._settings(
            speaker_id=self._chosen(speaker), noise_scale=0.0, noise_w_scale=0.0, normalize_audio=False
        )
        parts = [chunk.audio_float_array for chunk in self._voice.synthesize(text, settings)]
        spoken = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return stretch(spoken.astype(np.float32), self.sample_rate, speed)

    def _chosen(self, speaker: int | str | None) -> int | None:
        config = self._voice.config
        number = config.speaker_id_map.get(speaker, speaker) if isinstance(speaker, str) else speaker
        if number is None:
            return None if config.num_speakers <= 1 else int(config.default_speaker_id)
        if isinstance(number, int) and 0 <= number < max(1, config.num_speakers):
            return number if config.num_speakers > 1 else None
        raise LoadError(f"{self._name} has no speaker {speaker!r}.")


def stretch(samples: NDArray[np.float32], rate: int, speed: float) -> NDArray[np.float32]:
    """Return `samples` (mono) in 1/`speed` of their length, to a sample, at the same pitch.

    For runtimes whose own control of speed is not exact. WSOLA. Source: W. Verhelst and M. Roelands, "An overlap-add
    technique based on waveform similarity (WSOLA) for high quality time-scale modification of speech", ICASSP 1993.
    """
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

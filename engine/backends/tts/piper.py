"""Speaks with Piper's voices (X.onnx and X.onnx.json), through the package piper-tts where it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.tts.sound import stretch
from engine.errors import LoadError
from engine.weights.safety import read_config

# Other types of phonemes make Piper download models, or need packages that it does not install.
_PHONEMES = ("espeak", "text")


def load(folder: Path) -> "PiperSpeech":
    import piper
    from piper.config import SynthesisConfig

    config = next(iter(sorted(folder.glob("*.onnx.json"))), None)
    if config is None or not config.with_suffix("").is_file():
        raise LoadError(f"{folder.name} has no pair of X.onnx and X.onnx.json. Finish the download.")
    phonemes = read_config(config).get("phoneme_type", "espeak")
    if phonemes not in _PHONEMES:
        raise LoadError(f"{folder.name} needs phonemes of type {phonemes!r}; only {' and '.join(_PHONEMES)} work here.")
    voice = piper.PiperVoice.load(config.with_suffix(""), config, download_dir=folder)
    return PiperSpeech(voice, SynthesisConfig)


class PiperSpeech:
    """A `Synthesizer` (service.py)."""

    def __init__(self, voice: Any, settings: Any) -> None:
        self.sample_rate: int = voice.config.sample_rate
        self._voice, self._settings = voice, settings

    def sayable(self, text: str) -> str:
        """As `Synthesizer.sayable`; [[ ]] would make Piper read phonemes."""
        text = text.replace("[[", "[").replace("]]", "]")
        return text if any(self._voice.phonemize(text)) else ""

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:  # noqa: ARG002
        """As `Synthesizer.speak`. Without noise: an ONNX session's random numbers cannot be seeded per call."""
        settings = self._settings(speaker_id=speaker, noise_scale=0.0, noise_w_scale=0.0, normalize_audio=False)
        parts = [chunk.audio_float_array for chunk in self._voice.synthesize(text, settings)]
        return stretch(parts, self.sample_rate, speed)

"""The shipped voices of eSpeak NG, texts for them, and a measure of pitch."""

from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from speech_parts import NINE, pitch_hz

from engine.backends.tts.service import loaded
from engine.voices.catalogue import SHIPPED

__all__ = ["NINE", "TEXTS", "folder_of", "pitch_hz", "spoken"]

DOCS = Path(__file__).parents[4] / "docs"
TEXTS: dict[str, list[str]] = yaml.safe_load((DOCS / "voice-samples/texts.yaml").read_text("utf-8"))


def folder_of(language: str) -> Path:
    return SHIPPED / f"espeak-{language}"


def spoken(voice: str, text: str, *, speed: float = 1, seed: int = 1) -> tuple[int, NDArray[np.float32]]:
    """The rate and the samples of one piece of text."""
    model = loaded("espeak", folder_of(NINE[voice][1]))
    return model.sample_rate, model.speak(model.sayable(text), voice, speed, seed)

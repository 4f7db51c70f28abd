"""The languages, the voices of each (cast.yaml), and how a letter sounds in each voice (sounds.yaml). Loads no torch.

A pitch that is a multiple of the frame rate has the same phase in every frame. So one frame of a letter is all there
is to know of it, a frame can be learned sample by sample, and letters fade into each other without beating.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

FOLDER = Path(__file__).parent
SAMPLE_RATE = 16000
FRAME_SAMPLES = 320
PEAK = 0.5
HIGHEST_HZ = 4000
FORMANT_WIDTHS_HZ = (90, 130, 220)
FORMANT_GAINS = (1.0, 0.8, 0.45)
SPACE = " "
LETTERS: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "sounds.yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Part:
    """One voice. `pitch_hz` is its only pitch; `tract` scales the formants, `bright` the high harmonics."""

    id: str
    gender: Literal["female", "male"]
    pitch_hz: int
    tract: float
    bright: float


@dataclass(frozen=True)
class LanguageModel:
    """One model folder: `language` as MMS-TTS writes it, and the voices in the order of their speaker numbers."""

    folder: str
    language: str
    uroman: bool
    native: str
    sample: str
    voices: tuple[Part, ...]


@cache
def cast() -> tuple[LanguageModel, ...]:
    """Every model and its voices, in the order of the file."""
    return tuple(
        LanguageModel(**{**model, "voices": tuple(Part(**voice) for voice in model["voices"])})
        for model in _document()["models"]
    )


def all_voices() -> list[Part]:
    """All voices of all languages, in the order in which they are trained together."""
    return [part for model in cast() for part in model.voices]


def overlay(model: LanguageModel) -> str:
    """The text of the model's voices.yaml: what a catalogue of voices cannot read from its other files."""
    document = _document()
    voices = [
        {
            "speaker": number if len(model.voices) > 1 else None,
            "id": part.id,
            "name": part.id.capitalize(),
            "gender": part.gender,
            "description": f"{model.native}, {part.gender}. A demo: plain tones, not speech.",
        }
        for number, part in enumerate(model.voices)
    ]
    return yaml.safe_dump(
        {"licence": document["licence"], "consent": document["consent"], "demo": True, "voices": voices},
        sort_keys=False,
        width=120,
    )


def frame_of(part: Part, letter: str) -> NDArray[np.float32]:
    """One frame of a steady letter, (FRAME_SAMPLES,); its highest sample is PEAK times the letter's loudness."""
    if letter == SPACE:
        return np.zeros(FRAME_SAMPLES, dtype=np.float32)
    harmonics = np.arange(1, HIGHEST_HZ // part.pitch_hz + 1)
    hertz = harmonics * part.pitch_hz
    # A little of the lowest harmonics in every letter: without them the ear, and a measurement, miss the pitch.
    strength = 0.35 / harmonics
    for formant, width, gain in zip(LETTERS[letter]["formants"], FORMANT_WIDTHS_HZ, FORMANT_GAINS, strict=True):
        strength = strength + gain / (1 + ((hertz - formant * part.tract) / width) ** 2)
    strength = strength * (1 + hertz / 1000) ** (part.bright - 1.7)
    # Schroeder's phases spread the energy over the period: low peaks, no buzz.
    phases = np.pi * harmonics * (harmonics - 1) / len(harmonics)
    seconds = np.arange(FRAME_SAMPLES) / SAMPLE_RATE
    wave: NDArray[np.float64] = (
        strength[:, None] * np.cos(2 * np.pi * hertz[:, None] * seconds + phases[:, None])
    ).sum(axis=0)
    loudest = PEAK * float(LETTERS[letter]["loud"])
    scaled: NDArray[np.float32] = (wave * (loudest / np.abs(wave).max())).astype(np.float32)
    return scaled


def _document() -> Any:
    return yaml.safe_load((FOLDER / "cast.yaml").read_text(encoding="utf-8"))

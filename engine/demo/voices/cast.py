"""Reads cast.yaml: the languages, the voices of each and how they sound. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

CAST = Path(__file__).with_name("cast.yaml")


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


def everybody() -> list[Part]:
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


def _document() -> Any:
    return yaml.safe_load(CAST.read_text(encoding="utf-8"))

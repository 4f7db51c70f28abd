"""The words of the catalogue: a voice, and what is wrong with one that is hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.config.yaml import shown

if TYPE_CHECKING:
    from pathlib import Path

Gender = Literal["female", "male"]

_SHOWN_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """One voice of one TTS model. Every text in it is printable.

    `language` is the ISO 639-1 code, or the ISO 639-3 code of a language that has no shorter one. `model` is the name
    of the model's folder. `speaker` is how the family's runtime picks the voice: a number, the name of a voice's file
    without its ending, or None in a model of one voice. `available`: what runs the family is installed and
    the weights are there, in a format that holds no code.
    """

    id: str
    name: str
    gender: Gender
    language: str
    type: str
    description: str
    model: str
    family: str
    folder: Path
    speaker: int | str | None
    sample_rate: int | None
    licence: str | None
    consent: str | None
    demo: bool
    available: bool


@dataclass(frozen=True, slots=True)
class VoiceWarning:
    """For the operator: why a model, or one voice of it, is hidden or cannot speak. All of it is printable."""

    model: str
    voice: str | None
    message: str

    def __post_init__(self) -> None:
        # Names and texts from model folders are in here, and they go to terminals and logs.
        object.__setattr__(self, "model", shown(self.model))
        object.__setattr__(self, "voice", None if self.voice is None else shown(self.voice))
        object.__setattr__(self, "message", shown(self.message, _SHOWN_CHARACTERS))

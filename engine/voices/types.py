"""A voice, why one is hidden, and a text to be spoken: plain frozen data."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from engine.config.yaml import shown

Gender = Literal["female", "male"]
Quality = Literal["tones", "formant", "neural"]
AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

_SHOWN_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """One voice of one TTS model. Every text in it is printable.

    `language` is the ISO 639-1 code, or the ISO 639-3 code of a language that has no shorter one. `model` is the name
    of the model's folder. `speaker` is how the family's runtime chooses the voice: a number, the name of a voice's file
    without its ending, or None in a model of one voice. `available`: what runs the family is installed and
    the weights are there, in a format without code. `quality`: how the sound is made; demos are tones.
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
    quality: Quality


@dataclass(frozen=True, slots=True)
class VoiceWarning:
    """For the operator: why a model, or one voice of it, is hidden or cannot speak. All of it is printable."""

    model: str
    voice: str | None
    message: str

    def __post_init__(self) -> None:
        # It has names and texts from model folders, and goes to terminals and logs.
        object.__setattr__(self, "model", shown(self.model))
        object.__setattr__(self, "voice", None if self.voice is None else shown(self.voice))
        object.__setattr__(self, "message", shown(self.message, _SHOWN_CHARACTERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """A text to be spoken, already checked field by field.

    `voice` is an id or alias. `speed` 1 is the voice's own. The same `seed` gives the same sound.
    `owner` and `queue_share` as in `ChatRequest`; `before_turn` is awaited before it waits for a turn, and
    what it raises refuses the request.
    """

    request_id: str
    model: str
    voice: str
    text: str
    speed: float = 1.0
    seed: int | None = None
    response_format: AudioFormat = "mp3"
    owner: str = ""
    queue_share: float = 1.0
    before_turn: Callable[[], Awaitable[None]] | None = None


class SpeechJob(msgspec.Struct, frozen=True):
    """A text to be spoken as the worker gets it. `folder` to `language` are the voice's; owners take turns.

    It fails after `max_seconds` of the worker's time.
    """

    folder: str
    family: str
    speaker: int | str | None
    language: str
    text: str
    speed: float = 1.0
    seed: int | None = None
    response_format: AudioFormat = "mp3"
    owner: str = ""
    max_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """The next piece of the audio file, which may be empty while an encoder holds back, and the seconds in it."""

    data: bytes
    seconds: float

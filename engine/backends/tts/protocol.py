"""What the server's process and the worker that speaks say to each other: one job is one text, in one voice.

How frames travel is engine/process/protocol.py's; they are msgpack by msgspec, never pickles.
"""

from __future__ import annotations

import msgspec

from engine.voices.types import AudioFormat


class SpeechOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the worker works. `mark`: whether files say in their metadata that a model spoke."""

    threads: int
    mark: bool


class SpeechJob(msgspec.Struct, frozen=True):
    """One text to speak. `folder` to `language` are the voice's (engine/voices/types.py)."""

    folder: str
    family: str
    speaker: int | str | None
    language: str
    text: str
    speed: float = 1.0
    seed: int | None = None
    response_format: AudioFormat = "mp3"


class Audio(msgspec.Struct, frozen=True, tag=True):
    """The next piece of the one encoded stream, empty while the encoder holds back; the seconds that were spoken."""

    data: bytes
    seconds: float


class Spoken(msgspec.Struct, frozen=True, tag=True):
    """The last event: the seconds of all that was spoken."""

    seconds: float


SpeechEvent = Audio | Spoken

"""What the server's process and the worker that speaks say to each other: one job is one text, in one voice.

The worker answers with `SpeechChunk`s (engine/voices/types.py), one for each sentence. How messages travel is
engine/process/protocol.py's.
"""

import msgspec

from engine.voices.types import AudioFormat


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

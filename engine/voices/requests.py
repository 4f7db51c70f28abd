"""What crosses the border between the engine and whoever has it speak: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """A text to be spoken, already checked field by field.

    `voice` is a voice's id or an alias of one. `speed` 1 is the voice's own. The same `seed` gives the same sound.
    `owner`, `queue_share` and `on_turn` as in `ChatRequest`; `before_turn` is awaited before it waits for a turn, and
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
    on_turn: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """The next piece of the audio file, which may be empty while an encoder holds back, and the seconds in it."""

    data: bytes
    seconds: float

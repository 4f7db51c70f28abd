"""From the engine's pieces of speech to the answer: the audio file itself, or events that carry it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from engine import AudioFormat, GenerationError, SpeechRequest
from engine.stream import SpeechStream
from server.errors import ApiError

# As the convention names them; of Opus the registered name would be audio/ogg, which is what the file is.
MEDIA_TYPES: dict[AudioFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate=24000;channels=1",
}
_encode = msgspec.json.Encoder().encode


async def as_file(opening: Callable[[], Awaitable[SpeechStream]]) -> AsyncGenerator[bytes, None]:
    """Yield the file piece by piece, never an empty one. Closing it ends the speaking."""
    size = 0
    async with await opening() as chunks:
        async for chunk in chunks:
            if chunk.data:
                size += len(chunk.data)
                yield chunk.data
    if not size:
        raise _nothing_spoken()


async def as_events(
    opening: Callable[[], Awaitable[SpeechStream]], request: SpeechRequest
) -> AsyncGenerator[bytes, None]:
    """Yield an event per piece of the file, and one at its end that says how much it was. Closing ends the speaking."""
    size, seconds = 0, 0.0
    async with await opening() as chunks:
        async for chunk in chunks:
            seconds += chunk.seconds
            if chunk.data:
                size += len(chunk.data)
                yield _event("speech.audio.delta", audio=chunk.data)  # msgspec writes bytes as base64
    if not size:
        raise _nothing_spoken()
    # The convention counts tokens, and strict clients insist on these fields
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    usage = {"characters": len(request.text), "seconds": round(seconds, 3), **tokens}
    yield _event("speech.audio.done", usage=usage)


def failed(error: ApiError) -> bytes:
    """Encode what a stream of events ends with when it fails after its start."""
    return _event("error", error=error.body())


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: %b\n\n" % _encode({"type": kind, **fields})


def _nothing_spoken() -> GenerationError:
    return GenerationError("Nothing was spoken. Send the request again, or another text.")

"""The body of a speech request, checked field by field, and what it means to the engine."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from engine import AudioFormat, SpeechRequest
from server.schemas.chat import Strict
from server.schemas.engine_fields import NoEngineFields

if TYPE_CHECKING:
    from server.dependencies import Access
    from server.store import ApiKey

VoiceName = Annotated[str, Field(min_length=1, max_length=64)]


class VoiceReference(Strict):
    """A voice, as some clients name it."""

    id: VoiceName


class SpeechBody(NoEngineFields):
    """The body of `POST /v1/audio/speech`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """An id from `GET /v1/audio/models`."""
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    """What is spoken."""
    voice: VoiceName | VoiceReference
    """An id from `GET /v1/audio/voices`, or one of the model's other names for it, like `alloy`."""
    response_format: AudioFormat | None = None
    """Default mp3."""
    speed: Annotated[float, Field(ge=0.25, le=4, allow_inf_nan=False)] | None = None
    """Default 1, the voice's own."""
    stream_format: Literal["audio", "sse"] | None = None
    """audio (default): the file itself, as it is spoken. sse: events with pieces of it in base64."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """The same seed gives the same sound. Default: by chance."""


def to_speech_request(body: SpeechBody, key: ApiKey, access: Access) -> SpeechRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it.

    The request id is ours. Raises `ApiError`.
    """
    access.check(key, body.model)
    return SpeechRequest(
        request_id=secrets.token_hex(12),
        model=body.model,
        voice=body.voice if isinstance(body.voice, str) else body.voice.id,
        text=body.input,
        speed=1.0 if body.speed is None else body.speed,
        seed=body.seed,
        response_format=body.response_format or "mp3",
    )

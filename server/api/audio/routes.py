"""`POST /v1/audio/speech`, and what can speak: `GET /v1/audio/voices` and `GET /v1/audio/models`.

With the setting `open_voice_list` the two lists also answer without a key (middleware.py), and then list all.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from engine import AudioFormat, GenerationError, SpeechRequest
from server.api.audio.voices import VoiceList, VoiceQuery
from server.api.caller import AudioCaller, Caller, TheAccess
from server.api.schema import Listed, Model, ModelBody, RandomSeed, ShortText, Strict
from server.auth.access import KeyIfSent
from server.http.bodies import StrictRoute
from server.http.streaming import StreamedResponse
from server.store.keys import ApiKey

router = APIRouter(prefix="/v1/audio", tags=["audio"], route_class=StrictRoute)
_KeyIfSent = Annotated[ApiKey | None, Depends(KeyIfSent("audio"))]
# As the convention names them. The file of Opus is Ogg, whose registered name is audio/ogg.
MEDIA_TYPES: dict[AudioFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate=24000;channels=1",
}
_VoiceName = Annotated[str, Field(min_length=1, max_length=64)]


class VoiceReference(Strict):
    """A voice, as some clients name it."""

    id: _VoiceName


class SpeechBody(ModelBody):
    model: ShortText
    """An id from `GET /v1/audio/models`."""
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    """What is spoken."""
    voice: _VoiceName | VoiceReference
    """An id from `GET /v1/audio/voices`, or one of the model's other names for it, like `alloy`."""
    response_format: AudioFormat | None = None
    """Default mp3."""
    speed: Annotated[float, Field(ge=0.25, le=4, allow_inf_nan=False)] | None = None
    """Default 1, the voice's own."""
    stream_format: Literal["audio", "sse"] | None = None
    """audio (default): the file itself, as it is spoken. sse: events with pieces of it in base64."""
    seed: RandomSeed | None = None
    """The same seed gives the same sound. Default: random."""


@router.post("/speech", response_class=Response)
async def speak(body: SpeechBody, caller: AudioCaller) -> Response:
    """Speak a text. The answer begins with its first words, while the rest is still being spoken."""
    asked = SpeechRequest(
        request_id=secrets.token_hex(12),
        model=caller.access.model_id(caller.key, body.model),
        voice=body.voice if isinstance(body.voice, str) else body.voice.id,
        text=body.input,
        speed=1.0 if body.speed is None else body.speed,
        seed=body.seed,
        response_format=body.response_format or "mp3",
    )
    as_events = body.stream_format == "sse"
    caller.record.model, caller.record.stream = asked.model, as_events
    pieces = _spoken(caller, asked, as_events=as_events)
    if as_events:
        return caller.streamed(pieces, failure=lambda error: _event("error", error=error.body()))
    media_type = MEDIA_TYPES[asked.response_format]
    return StreamedResponse(pieces, media_type=media_type, failure=None)


async def _spoken(caller: Caller, asked: SpeechRequest, *, as_events: bool) -> AsyncGenerator[bytes, None]:
    """Yield the file piece by piece, or an event per piece and a last one with the usage. Closing ends the speaking."""
    spoken, seconds = False, 0.0
    async with await caller.engine.speech(asked) as chunks:
        async for chunk in chunks:
            seconds += chunk.seconds
            if chunk.data:
                spoken = True
                yield _event("speech.audio.delta", audio=chunk.data) if as_events else chunk.data
    if not spoken:
        raise GenerationError("Nothing was spoken. Send the request again, or another text.")
    if as_events:
        # The convention counts tokens, and strict clients insist on these fields
        tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        usage = {"characters": len(asked.text), "seconds": round(seconds, 3), **tokens}
        yield _event("speech.audio.done", usage=usage)


def _event(kind: str, **fields: Any) -> bytes:
    """Encode an event of this convention, which names its type in the data alone. Bytes become base64."""
    return b"data: %b\n\n" % msgspec.json.encode({"type": kind, **fields})


class ModelId(BaseModel):
    """A model as Open WebUI reads it."""

    id: str


class SpeechModelList(Listed[Model]):
    """The models that speak, twice: `data` as in `GET /v1/models`, `models` for clients that read their ids there."""

    models: list[ModelId]


@router.get("/voices")
async def list_voices(
    query: Annotated[VoiceQuery, Query()], key: _KeyIfSent, access: TheAccess, request: Request
) -> VoiceList:
    """List the voices of the speech models that this key may use."""
    voices_of = request.app.state.engine.voices
    offered = [(model.id, voice) for model in access.speech_models(key) for voice in voices_of(model.id)]
    return VoiceList.of(query.chosen(offered))


@router.get("/models")
async def list_speech_models(key: _KeyIfSent, access: TheAccess) -> SpeechModelList:
    """List the models that speak and that this key may use."""
    data = [Model.model_validate(info) for info in access.speech_models(key)]
    return SpeechModelList(models=[ModelId(id=model.id) for model in data], data=data)

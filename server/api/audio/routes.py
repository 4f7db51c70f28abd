"""`POST /v1/audio/speech`, and what can speak: `GET /v1/audio/voices` and `GET /v1/audio/models`.

The two lists answer without a key if the setting `open_voice_list` says so (middleware.py), then all of it.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from server.api import answering
from server.api.audio.answer import MEDIA_TYPES, as_events, as_file, failed
from server.api.audio.schema import SpeechBody, SpeechModelList, VoiceList, VoiceQuery, to_speech_request
from server.api.dependencies import Caller, CallerWith, TheAccess, TheEngine
from server.auth.access import KeyIfSent
from server.http.routing import StrictRoute
from server.http.streaming import StreamedResponse
from server.store import ApiKey

router = APIRouter(prefix="/v1/audio", tags=["audio"], route_class=StrictRoute)
_KeyIfSent = Annotated[ApiKey | None, Depends(KeyIfSent("audio"))]


@router.get("/voices")
async def list_voices(
    query: Annotated[VoiceQuery, Query()], key: _KeyIfSent, access: TheAccess, engine: TheEngine
) -> VoiceList:
    """List the voices of the speech models that this key may use."""
    offered = [(model.id, voice) for model in access.speech_models(key) for voice in engine.voices(model.id)]
    return VoiceList.of(query.chosen(offered))


@router.get("/models")
async def list_speech_models(key: _KeyIfSent, access: TheAccess) -> SpeechModelList:
    """List the models that speak and that this key may use."""
    return SpeechModelList.of(access.speech_models(key))


@router.post("/speech", response_class=Response)
async def speak(body: SpeechBody, caller: Annotated[Caller, Depends(CallerWith("audio"))]) -> Response:
    """Speak a text. The answer begins with its first words, while the rest is still being spoken."""
    asked = to_speech_request(body, caller)
    caller.record.model, caller.record.stream = asked.model, body.stream_format == "sse"
    if body.stream_format != "sse":
        pieces, media_type = as_file(lambda: caller.engine.speech(asked)), MEDIA_TYPES[asked.response_format]
        return StreamedResponse(pieces, media_type=media_type, drain=caller.drain, failure=None)
    return answering.streamed(caller, as_events(lambda: caller.engine.speech(asked), asked), failure=failed)

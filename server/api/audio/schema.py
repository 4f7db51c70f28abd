"""What may be asked of speech, checked field by field, and how voices and the models that speak are shown."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

import engine
from engine import AudioFormat, SpeechRequest, language_code
from engine.config.messages import near_miss
from server.api.chat_schema import NoEngineFields, Strict
from server.api.dependencies import Caller
from server.api.schema import Asked, Model
from server.errors import ApiError

_LISTED = 30
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


def to_speech_request(body: SpeechBody, caller: Caller) -> SpeechRequest:
    """Say in the engine's words what the body says, once it is known that the key may ask for it.

    The request id is ours. Raises `ApiError`.
    """
    caller.access.check(caller.key, body.model)
    return SpeechRequest(
        request_id=secrets.token_hex(12),
        model=body.model,
        voice=body.voice if isinstance(body.voice, str) else body.voice.id,
        text=body.input,
        speed=1.0 if body.speed is None else body.speed,
        seed=body.seed,
        response_format=body.response_format or "mp3",
    )


class VoiceQuery(Asked):
    """Which voices to list: those that fit all of it."""

    language: str | None = None
    """A code like `am`, in any form: `amh`, `am-ET`."""
    gender: Literal["female", "male"] | None = None
    model: str | None = None
    """A voice's `model`, or an id from `GET /v1/audio/models`."""

    def chosen(self, offered: Sequence[tuple[str, engine.Voice]]) -> list[engine.Voice]:
        """Return the voices that fit, of those `offered` with the ids of their speech models.

        A language that none of them speaks gives an empty list. Raises `ApiError` for what is no language and no
        model; it names the ones there are.
        """
        if not offered:
            return []
        language = None if self.language is None else language_code(self.language)
        if self.language is not None and language is None:
            spoken = dict.fromkeys(voice.language for _, voice in offered)
            raise _unknown("language", self.language, "must be a code of a language", list(spoken))
        models = dict.fromkeys(name for served_by, voice in offered for name in (voice.model, served_by))
        if self.model is not None and self.model not in models:
            raise _unknown("model", self.model, "must be a model that speaks", sorted(models))
        return [
            voice
            for served_by, voice in offered
            if language in {None, voice.language}
            and self.gender in {None, voice.gender}
            and self.model in {None, voice.model, served_by}
        ]


def _unknown(param: str, given: str, rule: str, known: Sequence[str]) -> ApiError:
    near = near_miss(given.lower(), known)
    meant = f" Did you mean `{near}`?" if near else ""
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    there = ", ".join(f"`{name}`" for name in known[:_LISTED])
    return ApiError(400, "invalid_value", f"`{param}` {rule}.{meant} There is {there}{more}.", param=param)


class Voice(BaseModel):
    """One voice. `model` is the TTS model that speaks with it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """`voice` of a speech request."""
    name: str
    gender: Literal["female", "male"]
    language: str
    """ISO 639-1, or ISO 639-3 for a language that has no shorter code."""
    type: str
    """`ethiopian` (am, so, ti, om), `english_standard` (en) or `standard`."""
    description: str
    model: str
    licence: str | None
    """Of the TTS model; null if it does not say."""
    demo: bool
    """Made by this project to try things out, not to be listened to."""
    available: bool
    """false: it is known but cannot speak, since what runs its model is not installed."""

    @classmethod
    def of(cls, voice: engine.Voice) -> Self:
        """Show what the catalogue knows."""
        return cls(
            id=voice.id,
            name=voice.name,
            gender=voice.gender,
            language=voice.language,
            type=voice.type,
            description=voice.description,
            model=voice.model,
            licence=voice.licence,
            demo=voice.demo,
            available=voice.available,
        )


class VoiceList(BaseModel):
    """The voices that the key may use: the Ethiopian languages first, then English, then by code."""

    object: Literal["list"] = "list"
    voices: list[Voice]

    @classmethod
    def of(cls, voices: Iterable[engine.Voice]) -> Self:
        """List each voice once, also where several models of models.yaml offer it."""
        once = {(voice.folder, voice.id): voice for voice in voices}
        return cls(voices=[Voice.of(voice) for voice in once.values()])


class ModelId(BaseModel):
    """A model as Open WebUI reads it."""

    id: str


class SpeechModelList(BaseModel):
    """The models that speak, twice: `data` as in `GET /v1/models`, `models` for clients that read their ids there."""

    object: Literal["list"] = "list"
    models: list[ModelId]
    data: list[Model]

    @classmethod
    def of(cls, models: Iterable[engine.ModelInfo]) -> Self:
        """Show what the engine knows."""
        data = [Model.of(info) for info in models]
        return cls(models=[ModelId(id=model.id) for model in data], data=data)

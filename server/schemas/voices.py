"""Voices, and the models that speak with them, as the API shows them; and what may be asked of the list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict

from server.schemas.models import Model
from server.schemas.usage import Asked

if TYPE_CHECKING:
    from collections.abc import Iterable

    import engine


class VoiceQuery(Asked):
    """Which voices to list. Those that fit all of it; a value that no voice has gives an empty list."""

    language: str | None = None
    """A code like `am`."""
    gender: str | None = None
    """`female` or `male`."""
    model: str | None = None
    """A voice's `model`, or an id from `GET /v1/audio/models`."""

    def fits(self, voice: engine.Voice, served_by: str) -> bool:
        """Whether to list a voice of the speech model `served_by`."""
        return (
            self.language in {None, voice.language}
            and self.gender in {None, voice.gender}
            and self.model in {None, voice.model, served_by}
        )


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

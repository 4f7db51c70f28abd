"""Voices, and the models that speak with them, as the API shows them; and what may be asked of the list."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict

from engine import language_code
from server.errors import ApiError
from server.schemas.models import Model
from server.schemas.usage import Asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import engine

_LISTED = 30


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
    near = get_close_matches(given.lower()[:64], known, n=1)
    meant = f" Did you mean `{near[0]}`?" if near else ""
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

"""The voices as `GET /v1/audio/voices` and `hearth voices` list them, and which of them are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Self

from pydantic import BaseModel

import engine
from engine import RequestError, language_code
from engine.config.messages import near_miss_sentence
from server.api.schema import Asked, Shown

_LISTED = 30


class VoiceQuery(Asked):
    """Which voices to list: those that fit all of it."""

    language: str | None = None
    """A code like `am`, in any form: `amh`, `am-ET`."""
    gender: Literal["female", "male"] | None = None
    model: str | None = None
    """A voice's `model`, or an id from `GET /v1/audio/models`."""

    def chosen(self, offered: Sequence[tuple[str, engine.Voice]]) -> list[engine.Voice]:
        """Return those that fit of the voices `offered`, each with the id of its speech model.

        Raises `RequestError` for an unknown language or model.
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


def _unknown(param: str, given: str, rule: str, known: Sequence[str]) -> RequestError:
    meant = near_miss_sentence(given.lower(), known)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    there = ", ".join(f"`{name}`" for name in known[:_LISTED])
    return RequestError(f"`{param}` {rule}.{meant} There is {there}{more}.", param=param)


class Voice(Shown):
    """One voice. `model` is the TTS model that speaks with it."""

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
    family: str
    """What speaks: `espeak`, `vits`, `piper`, `kokoro` or `omnivoice`."""
    quality: engine.Quality
    """`neural`, `formant` (computed, clear but mechanical), or `tones` of a demo."""
    licence: str | None
    """Of the TTS model; null if it does not say."""
    demo: bool
    """Made by this project to try things out, not to be listened to."""
    available: bool
    """false: it is known but cannot speak, since what runs its model is not installed."""


class VoiceList(BaseModel):
    """The voices that the key may use: the Ethiopian languages first, then English, then by code."""

    object: Literal["list"] = "list"
    voices: list[Voice]

    @classmethod
    def of(cls, voices: Iterable[engine.Voice]) -> Self:
        """List each voice once, also where several models of models.yaml offer it."""
        once = {(voice.folder, voice.id): voice for voice in voices}
        return cls(voices=[Voice.model_validate(voice) for voice in once.values()])

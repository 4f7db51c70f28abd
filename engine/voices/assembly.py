"""From what a model says and what people add to whole voices. A voice that lacks something is hidden, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.config.yaml import shown
from engine.voices.languages import language_name, voice_type
from engine.voices.overlay import VoiceEntry, is_id
from engine.voices.types import Voice, VoiceWarning

if TYPE_CHECKING:
    from engine.voices.files import ModelFolder
    from engine.voices.overlay import Overlay
    from engine.voices.readers import ModelFacts, Speaker

_LISTED = 5
_LISTED_WARNINGS = 20
_EXAMPLES = {"id": "id: selam", "name": "name: Selam", "gender": "gender: female", "language": "language: am"}


@dataclass(slots=True)
class Assembly:
    """The voices of one model, one after the other. `installed`: something that runs its family is there."""

    folder: ModelFolder
    family: str
    facts: ModelFacts
    overlay: Overlay
    demo: bool
    installed: bool
    voices: list[Voice] = field(default_factory=list)
    warnings: list[VoiceWarning] = field(default_factory=list)
    _lacking: dict[tuple[str, ...], list[Speaker]] = field(default_factory=dict)
    _mute: list[Speaker] = field(default_factory=list)

    def assemble(self) -> None:
        """Fill `voices` and `warnings`."""
        for note in (*self.facts.notes, *self.overlay.problems):
            self._warn(note)
        for speaker, entry in self._chosen():
            self._add(speaker, entry)
        for keys, speakers in self._lacking.items():
            self._warn_of_lacking(keys, speakers)
        if self.voices and self.facts.problem:
            self._warn(f"its voices are listed but cannot speak: {self.facts.problem}")
        elif self._mute:
            which = _listed(self._mute)
            self._warn(f"{which} listed but cannot speak: {self._mute[0].problem}", self._mute)
        if len(self.warnings) > _LISTED_WARNINGS:
            more = len(self.warnings) - _LISTED_WARNINGS
            del self.warnings[_LISTED_WARNINGS:]
            self._warn(f"and {more} more warnings")

    def _chosen(self) -> list[tuple[Speaker, VoiceEntry]]:
        if self.overlay.spec.voices is None:
            return [(speaker, VoiceEntry()) for speaker in self.facts.speakers]
        by_name = self._by_name()
        chosen: dict[int | str | None, tuple[Speaker, VoiceEntry]] = {}
        for entry in self.overlay.spec.voices:
            found = by_name.get(entry.speaker)
            said = f"{self.overlay.file} names speaker {'null' if entry.speaker is None else shown(str(entry.speaker))}"
            if found is None:
                known = ", ".join(_shown(speaker) for speaker in self.facts.speakers[:_LISTED]) or "none"
                more = "" if len(self.facts.speakers) <= _LISTED else ", ..."
                self._warn(f"{said}, which the model lacks: it has {known}{more}")
            elif found.speaker in chosen:
                self._warn(f"{said} twice, and the second is left out: keep one")
            else:
                chosen[found.speaker] = (found, entry)
        return list(chosen.values())

    def _by_name(self) -> dict[int | str | None, Speaker]:
        found: dict[int | str | None, Speaker] = {}
        for speaker in self.facts.speakers:
            found.setdefault(speaker.speaker, speaker)
            if speaker.label is not None:
                found.setdefault(speaker.label, speaker)
            # The only voice of a model has no number; people who count give it the first.
            if speaker.speaker is None:
                found[0] = speaker
        return found

    def _add(self, speaker: Speaker, entry: VoiceEntry) -> None:
        spec, facts = self.overlay.spec, self.facts
        identity = entry.id or (speaker.slug if is_id(speaker.slug) else None)
        name = entry.name or _clean(speaker.name, 64)
        gender = entry.gender or speaker.gender
        language = entry.language or spec.language or speaker.language or self.overlay.card_language
        if identity is None or name is None or gender is None or language is None:
            values = {"id": identity, "name": name, "gender": gender, "language": language}
            lacking = tuple(key for key, value in values.items() if value is None)
            self._lacking.setdefault(lacking, []).append(speaker)
            return
        if any(voice.id == identity for voice in self.voices):
            self._warn(f"two voices have the id {identity}, and the second is hidden: give it another", [speaker])
            return
        if speaker.problem:
            self._mute.append(speaker)
        self.voices.append(
            Voice(
                id=identity,
                name=name,
                gender=gender,
                language=language,
                type=voice_type(language),
                description=entry.description or _description(gender, language),
                model=self.folder.name,
                family=self.family,
                folder=self.folder.path,
                speaker=speaker.speaker,
                sample_rate=facts.sample_rate,
                licence=entry.licence or spec.licence or _clean(facts.licence or self.overlay.card_licence, 300),
                consent=entry.consent or spec.consent,
                demo=self.demo or spec.demo,
                available=self.installed and not facts.problem and not speaker.problem,
            )
        )

    def _warn_of_lacking(self, keys: tuple[str, ...], speakers: list[Speaker]) -> None:
        where = f"{self.folder.name}/{self.overlay.file}"
        known = speakers[0].speaker
        example = ", ".join([f"speaker: {'null' if known is None else known}", *(_EXAMPLES[key] for key in keys)])
        listen = " (listen to it first)" if "gender" in keys else ""
        self._warn(
            f"{_listed(speakers)} hidden: nothing says {' and '.join(f'`{key}`' for key in keys)}. Pick one: 1. write "
            f"it into {where} under `voices:`, like `- {{{example}}}`{listen}; 2. list only other voices there",
            speakers,
        )

    def _warn(self, message: str, speakers: list[Speaker] | None = None) -> None:
        voice = _shown(speakers[0]) if speakers and len(speakers) == 1 else None
        self.warnings.append(VoiceWarning(self.folder.name, voice, f"{self.folder.name}: {message}"))


def _description(gender: str, language: str) -> str:
    kind = {"ethiopian": "native ", "english_standard": "standard "}.get(voice_type(language), "")
    sentence = f"{kind}{gender} voice in {language_name(language)}"
    return sentence[0].upper() + sentence[1:]


def _clean(text: str | None, limit: int) -> str | None:
    line = " ".join((text or "").split())[:limit]
    return line if line and line.isprintable() else None


def _shown(speaker: Speaker) -> str:
    return "its only one" if speaker.speaker is None else shown(str(speaker.speaker))


def _listed(speakers: list[Speaker]) -> str:
    if len(speakers) == 1:
        return f"voice {_shown(speakers[0])} is" if speakers[0].speaker is not None else "its voice is"
    names = ", ".join(_shown(speaker) for speaker in speakers[:_LISTED])
    more = f" and {len(speakers) - _LISTED} more" if len(speakers) > _LISTED else ""
    return f"voices {names}{more} are"

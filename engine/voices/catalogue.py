"""Which voices there are: from model folders and what people add; and which of them each entry of models.yaml offers.

Every folder is read by its family's reader; nothing is loaded. A voice that lacks something is hidden, never guessed.
"""

import itertools
import logging
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from engine.config import Config, SpeechModelSpec
from engine.config.messages import near_misses
from engine.config.yaml import shown
from engine.demo import weights_dir as demo_weights_dir
from engine.errors import LoadError, RequestError
from engine.voices.files import LIMIT_ENTRIES, MetadataError, ModelFolder, unreadable
from engine.voices.languages import ETHIOPIAN, language_name, voice_type
from engine.voices.overlay import ID, Overlay, VoiceEntry, read_overlay
from engine.voices.readers import FAMILIES, Family, ModelFacts, Speaker
from engine.voices.types import Voice, VoiceWarning

_log = logging.getLogger("hearth.voices")

MAX_MODELS = 100
_LISTED_FOLDERS, _LISTED_SPEAKERS, _LISTED_WARNINGS = 20, 5, 20
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LANGUAGES_FIRST = (*ETHIOPIAN, "en")
# Voices that come with Hearth and speak words, of a family that may not be installed.
SHIPPED = Path(__file__).parent / "shipped"
_EXAMPLES = {"id": "selam", "name": "Selam", "gender": "female", "language": "am"}


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All voices, the Ethiopian languages first, then English, then by code; and what is wrong with the rest."""

    voices: tuple[Voice, ...] = ()
    warnings: tuple[VoiceWarning, ...] = ()
    problem: LoadError | None = None
    """Why it cannot be loaded."""
    notice: str = ""
    """What the operator should know about all voices."""

    @property
    def only_demos(self) -> bool:
        """Whether there are voices, and all of them are for trying out."""
        return bool(self.voices) and all(voice.demo for voice in self.voices)

    @property
    def only_shipped(self) -> bool:
        """Whether there are voices, and all of them came with Hearth."""
        return bool(self.voices) and all(voice.demo or voice.folder.parent == SHIPPED for voice in self.voices)

    @property
    def notices(self) -> tuple[str, ...]:
        return (*filter(None, [self.notice]), *(warning.message for warning in self.warnings))

    def find(self, voice_id: str) -> Voice | None:
        return next((voice for voice in self.voices if voice.id == voice_id), None)


class Voices:
    """The catalogues of all speech models. Made by reading folders, which blocks; a reload makes one from `before`."""

    def __init__(self, config: Config, weights_dir: Path, before: Self | None = None) -> None:
        specs = [spec for spec in config.models.values() if isinstance(spec, SpeechModelSpec)]
        self._aliases = {spec.id: spec.voice_aliases for spec in specs}
        self._catalogues: dict[str, Catalogue] = {}
        for spec in specs:
            demo = None if spec.demo is None else demo_weights_dir(spec.demo)
            try:
                found = read_catalogue(weights_dir / spec.weights, demo, SHIPPED if spec.espeak else None)
            except LoadError as error:
                found = Catalogue(problem=error, notice=error.message)
                known = found if before is None else before._catalogues.get(spec.id, found)  # noqa: SLF001  # its own kind
                if known.problem is None:
                    found = replace(known, notice=f"its voices stay as they were. {error.message}")
                    _log.error("%s: %s", spec.id, found.notice)
            self._catalogues[spec.id] = found

    def of(self, model: str) -> Catalogue:
        """Return what a speech model offers; nothing for other models."""
        return self._catalogues.get(model, Catalogue())

    def log_warnings(self) -> None:
        for model, found in self._catalogues.items():
            for warning in found.warnings:
                _log.warning("%s: %s", model, warning.message)

    def near(self, model: str, voice: str) -> list[str]:
        """Return up to three similar ids and aliases of voices that can speak."""
        ids = [one.id for one in self.of(model).voices if one.available]
        aliases = [name for name, of in self._aliases[model].items() if of in ids]
        return near_misses(voice.lower(), [*ids, *aliases], 3)

    def find(self, model: str, voice: str) -> Voice:
        """Return a voice by its id or alias. Raises `RequestError`."""
        found = self.of(model).find(self._aliases[model].get(voice, voice))
        if found is None:
            near = " or ".join(f"`{one}`" for one in self.near(model, voice))
            meant = f" Did you mean {near}?" if near else ""
            sentence = f"This model has no such voice.{meant} GET /v1/audio/voices lists the ones there are."
            raise RequestError(sentence, param="voice")
        if not found.available:
            raise RequestError(
                "This voice cannot speak on this server: what runs its model is not installed. Choose another; GET "
                "/v1/audio/voices says which are `available`.",
                param="voice",
            )
        return found


def read_catalogue(folder: Path | None, demos: Path | None = None, shipped: Path | None = None) -> Catalogue:
    """Read the model folders inside `folder`, one TTS model each; a folder that is not there holds none.

    A voice in `folder` replaces the one with its id in `shipped`, which replaces the demo voice if it can speak. Two
    in `folder` with the same id are a `LoadError`. Any other fault hides the model or the voice, with a warning;
    shipped voices that are not installed are left out without one. Blocks.
    """
    warnings: list[VoiceWarning] = []
    known = _by_id(_scan(demos, warnings, demo=True))
    known |= {name: voice for name, voice in _by_id(_scan(shipped, [], demo=False)).items() if voice.available}
    known |= _by_id(_scan(folder, warnings, demo=False))
    return Catalogue(tuple(sorted(known.values(), key=_order)), tuple(warnings))


def _order(voice: Voice) -> tuple[int, str, str, str]:
    return (*_LANGUAGES_FIRST, voice.language).index(voice.language), voice.language, voice.gender, voice.id


def _by_id(voices: list[Voice]) -> dict[str, Voice]:
    found: dict[str, Voice] = {}
    for voice in voices:
        other = found.setdefault(voice.id, voice)
        if other is not voice:
            one, two = (f"{both.folder.parent.name}/{both.model}" for both in (other, voice))
            raise LoadError(
                f"Two voices have the id {voice.id}: one in {one}, one in {two}. Give one of them another `id` in its "
                "voices.yaml, or remove one of the folders."
            )
    return found


def _scan(folder: Path | None, warnings: list[VoiceWarning], *, demo: bool) -> list[Voice]:
    voices: list[Voice] = []
    for path in [] if folder is None else _model_folders(folder, warnings):
        try:
            voices += _read_model(ModelFolder(path), warnings, demo=demo)
        except MetadataError as error:
            warnings.append(VoiceWarning(path.name, None, f"{path.name} is hidden: {error}"))
    return voices


def _model_folders(folder: Path, warnings: list[VoiceWarning]) -> list[Path]:
    try:
        if not folder.exists():
            return []
        with os.scandir(folder) as entries:
            found = sorted(itertools.islice(entries, LIMIT_ENTRIES), key=lambda entry: entry.name)
    except OSError as error:
        warnings.append(VoiceWarning(folder.name, None, str(unreadable(folder.name, error))))
        return []
    problems = {entry.name: _problem_of_entry(entry) for entry in found}
    left_out = [name for name, problem in problems.items() if problem]
    warnings += [
        VoiceWarning(name, None, f"{shown(name)} is left out: {problems[name]}") for name in left_out[:_LISTED_FOLDERS]
    ]
    if len(left_out) > _LISTED_FOLDERS:
        more = f"{shown(folder.name)}: {len(left_out) - _LISTED_FOLDERS} more folders or files are left out"
        warnings.append(VoiceWarning(folder.name, None, more))
    paths = [folder / name for name, problem in problems.items() if problem is None]
    if len(paths) > MAX_MODELS:
        some = f"{len(paths) - MAX_MODELS} of its {len(paths)} models are left out: {MAX_MODELS} are read at most"
        warnings.append(VoiceWarning(folder.name, None, f"{shown(folder.name)}: {some}"))
    return paths[:MAX_MODELS]


def _problem_of_entry(entry: os.DirEntry[str]) -> str | None:
    """Say what is wrong with an entry; None: it is a model folder; empty text: ignore it."""
    if entry.name.startswith("."):
        return ""
    if entry.name == "config.json" or entry.name.endswith((".onnx", ".safetensors")):
        return "each model is in a folder of its own: make one and put the model's files there"
    if entry.is_symlink():
        return "it is a link, and links are not followed here: put the folder itself there"
    if not entry.is_dir(follow_symlinks=False):
        return ""
    if not _FOLDER_NAME.fullmatch(entry.name):
        return (
            "rename the folder; names have 1 to 100 letters, digits and `-` `_` `.`, and begin with a letter or digit"
        )
    return None


def _read_model(folder: ModelFolder, warnings: list[VoiceWarning], *, demo: bool) -> list[Voice]:
    for family in FAMILIES:
        facts = family.read(folder)
        if facts is not None:
            break
    else:
        kinds = "; ".join(f"{family.name}: {family.wanted}" for family in FAMILIES)
        raise MetadataError(f"it is not a TTS model that Hearth knows ({kinds})")
    made = _Assembly(folder, family, facts, read_overlay(folder), demo=demo, installed=family.installed)
    made.assemble()
    warnings += made.warnings
    return made.voices


@dataclass(slots=True)
class _Assembly:
    """Collects the voices of one model. `installed`: a package that runs its family is there."""

    folder: ModelFolder
    family: Family
    facts: ModelFacts
    overlay: Overlay
    demo: bool
    installed: bool
    voices: list[Voice] = field(default_factory=list)
    warnings: list[VoiceWarning] = field(default_factory=list)
    _lacking: dict[tuple[str, ...], list[Speaker]] = field(default_factory=dict)
    _mute: list[Speaker] = field(default_factory=list)

    def assemble(self) -> None:
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
        if more := len(self.warnings[_LISTED_WARNINGS:]):
            del self.warnings[_LISTED_WARNINGS:]
            self._warn(f"and {more} more warnings")
        if self.voices and not self.installed:
            missing = f"what runs {self.family.name} is not installed: {self.family.install}"
            self._warn(f"its voices are listed but cannot speak: {missing}")

    def _chosen(self) -> list[tuple[Speaker, VoiceEntry]]:
        if self.overlay.spec.voices is None:
            return [(speaker, VoiceEntry()) for speaker in self.facts.speakers]
        speakers = self.facts.speakers
        by_name: dict[int | str | None, Speaker] = {one.label: one for one in speakers if one.label is not None}
        by_name |= {one.speaker: one for one in speakers}
        if None in by_name:  # the only voice of a model has no number; people may write the first one
            by_name[0] = by_name[None]
        chosen: dict[int | str | None, tuple[Speaker, VoiceEntry]] = {}
        for entry in self.overlay.spec.voices:
            found = by_name.get(entry.speaker)
            if self.facts.instructed is not None and isinstance(entry.speaker, str):
                found = self.facts.instructed(entry.speaker, entry.language or self.overlay.spec.language)
            said = f"{self.overlay.file} names speaker {'null' if entry.speaker is None else shown(str(entry.speaker))}"
            if found is None:
                known = ", ".join(_shown(speaker) for speaker in speakers[:_LISTED_SPEAKERS]) or "none"
                more = "" if len(speakers) <= _LISTED_SPEAKERS else ", ..."
                self._warn(f"{said}, which the model lacks: it has {known}{more}")
            elif found.speaker in chosen:
                self._warn(f"{said} twice, and the second is left out: keep one")
            else:
                chosen[found.speaker] = (found, entry)
        return list(chosen.values())

    def _add(self, speaker: Speaker, entry: VoiceEntry) -> None:
        spec, facts = self.overlay.spec, self.facts
        said: dict[str, Any] = {
            "id": entry.id or (speaker.slug if ID.fullmatch(speaker.slug) else None),
            "name": entry.name or _clean(speaker.name, 64),
            "gender": entry.gender or speaker.gender,
            "language": entry.language or spec.language or speaker.language or self.overlay.card_language,
        }
        if lacking := tuple(key for key, value in said.items() if value is None):
            self._lacking.setdefault(lacking, []).append(speaker)
            return
        if any(voice.id == said["id"] for voice in self.voices):
            self._warn(f"two voices have the id {said['id']}, and the second is hidden: give it another", [speaker])
            return
        if speaker.problem:
            self._mute.append(speaker)
        self.voices.append(
            Voice(
                **said,
                type=voice_type(said["language"]),
                description=entry.description or _description(said["gender"], said["language"]),
                model=self.folder.name,
                family=self.family.name,
                folder=self.folder.path,
                speaker=speaker.speaker,
                sample_rate=facts.sample_rate,
                licence=entry.licence or spec.licence or _clean(facts.licence or self.overlay.card_licence, 300),
                consent=entry.consent or spec.consent,
                demo=self.demo or spec.demo,
                available=self.installed and not facts.problem and not speaker.problem,
                quality="tones" if self.demo or spec.demo else self.family.quality,
            )
        )

    def _warn_of_lacking(self, keys: tuple[str, ...], speakers: list[Speaker]) -> None:
        where = f"{self.folder.name}/{self.overlay.file}"
        known = speakers[0].speaker
        values = {"speaker": "null" if known is None else known, **{key: _EXAMPLES[key] for key in keys}}
        example = ", ".join(f"{key}: {value}" for key, value in values.items())
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
    kind = {"ethiopian": f"Native {gender}", "english_standard": f"Standard {gender}"}.get(voice_type(language))
    return f"{kind or gender.capitalize()} voice in {language_name(language)}"


def _clean(text: str | None, limit: int) -> str | None:
    line = " ".join((text or "").split())[:limit]
    return line if line and line.isprintable() else None


def _shown(speaker: Speaker) -> str:
    return "its only one" if speaker.speaker is None else shown(str(speaker.speaker))


def _listed(speakers: list[Speaker]) -> str:
    if len(speakers) == 1:
        return f"voice {_shown(speakers[0])} is" if speakers[0].speaker is not None else "its voice is"
    names = ", ".join(_shown(speaker) for speaker in speakers[:_LISTED_SPEAKERS])
    more = f" and {len(speakers) - _LISTED_SPEAKERS} more" if len(speakers) > _LISTED_SPEAKERS else ""
    return f"voices {names}{more} are"

"""Which voices there are: every model folder in the given folders, read by its family's reader. Nothing is loaded."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config.yaml import shown
from engine.errors import LoadError
from engine.voices.assembly import Assembly
from engine.voices.files import LIMIT_ENTRIES, MetadataError, ModelFolder, unreadable
from engine.voices.languages import ETHIOPIAN
from engine.voices.overlay import read_overlay
from engine.voices.readers import is_installed, readers
from engine.voices.types import Voice, VoiceWarning

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.voices.readers import Reader

MAX_MODELS = 100
_LISTED = 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LANGUAGES_FIRST = (*ETHIOPIAN, "en")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All voices, the Ethiopian languages first, then English, then by code; and what is wrong with the rest."""

    voices: tuple[Voice, ...] = ()
    warnings: tuple[VoiceWarning, ...] = ()

    def find(self, voice_id: str) -> Voice | None:
        """Return the voice of this id."""
        return next((voice for voice in self.voices if voice.id == voice_id), None)

    def models(self) -> tuple[str, ...]:
        """Return the names of the models that have a voice here."""
        return tuple(sorted({voice.model for voice in self.voices}))


def read_catalogue(folders: Sequence[Path], demo_folders: Sequence[Path]) -> Catalogue:
    """Read the model folders inside `folders`, one TTS model each; a folder that is not there holds none.

    A voice in `folders` replaces the demo voice of its id. Whatever else is wrong with a model hides it, or the voice,
    with a warning. Reads files, so call it in a thread where that must not wait.

    Raises:
        LoadError: Two voices that are not demo voices have the same id; it names both folders.
    """
    warnings: list[VoiceWarning] = []
    installed = {reader.FAMILY: all(is_installed(name) for name in reader.RUNTIMES) for reader in readers()}
    demo = _by_id(_scan(demo_folders, installed, warnings, demo=True))
    real = _by_id(_scan(folders, installed, warnings, demo=False))
    return Catalogue(tuple(sorted({**demo, **real}.values(), key=_order)), tuple(warnings))


def _order(voice: Voice) -> tuple[int, str, str, str]:
    first = _LANGUAGES_FIRST.index(voice.language) if voice.language in _LANGUAGES_FIRST else len(_LANGUAGES_FIRST)
    return first, voice.language, voice.gender, voice.id


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


def _scan(
    folders: Sequence[Path], installed: dict[str, bool], warnings: list[VoiceWarning], *, demo: bool
) -> list[Voice]:
    voices: list[Voice] = []
    for folder in folders:
        for path in _model_folders(folder, warnings):
            try:
                voices += _read_model(ModelFolder(path), installed, warnings, demo=demo)
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
        VoiceWarning(name, None, f"{shown(name)} is left out: {problems[name]}") for name in left_out[:_LISTED]
    ]
    if len(left_out) > _LISTED:
        more = f"{shown(folder.name)}: {len(left_out) - _LISTED} more folders or files are left out"
        warnings.append(VoiceWarning(folder.name, None, more))
    paths = [folder / name for name, problem in problems.items() if problem is None]
    if len(paths) > MAX_MODELS:
        some = f"{len(paths) - MAX_MODELS} of its {len(paths)} models are left out: {MAX_MODELS} are read at most"
        warnings.append(VoiceWarning(folder.name, None, f"{shown(folder.name)}: {some}"))
    return paths[:MAX_MODELS]


def _problem_of_entry(entry: os.DirEntry[str]) -> str | None:
    """Say what is wrong with an entry; None: it is a model folder, empty text: it is something else."""
    if entry.name.startswith("."):
        return ""
    if entry.name == "config.json" or entry.name.endswith((".onnx", ".safetensors")):
        return "each model is in a folder of its own: make one and put the model's files there"
    if entry.is_symlink():
        return "it is a link, and links are not followed here: put the folder itself there"
    if not entry.is_dir(follow_symlinks=False):
        return ""
    if not _NAME.fullmatch(entry.name):
        return (
            "rename the folder; names have 1 to 100 letters, digits and `-` `_` `.`, and begin with a letter or digit"
        )
    return None


def _read_model(
    folder: ModelFolder, installed: dict[str, bool], warnings: list[VoiceWarning], *, demo: bool
) -> list[Voice]:
    for reader in readers():
        facts = reader.read(folder)
        if facts is not None:
            break
    else:
        kinds = "; ".join(f"{one.FAMILY}: {one.WANTED}" for one in readers())
        raise MetadataError(f"it is no TTS model that is known here ({kinds})")
    ready = installed[reader.FAMILY]
    made = Assembly(folder, reader.FAMILY, facts, read_overlay(folder), demo=demo, installed=ready)
    made.assemble()
    warnings += made.warnings
    if made.voices and not ready:
        warnings.append(_not_installed(folder, reader))
    return made.voices


def _not_installed(folder: ModelFolder, reader: Reader) -> VoiceWarning:
    message = f"its voices are listed but cannot speak: what runs {reader.FAMILY} is not installed: {reader.INSTALL}"
    return VoiceWarning(folder.name, None, f"{folder.name}: {message}")

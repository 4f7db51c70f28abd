"""Kokoro: a model with `voices/af_heart.safetensors` and the like, whose names say language and gender.

`a` and `b` are American and British English: `am_adam` is an American man and has nothing to do with Amharic.
"""

from __future__ import annotations

import re

from engine.config.yaml import shown
from engine.voices.files import ModelFolder
from engine.voices.readers import MAX_SPEAKERS, ModelFacts, Speaker, is_installed, slug
from engine.voices.types import Gender

FAMILY = "kokoro"
WANTED = "kokoro-v1_0.safetensors with voices/af_heart.safetensors and the like"
RUNTIMES = ("kokoro",)
INSTALL = "pip install kokoro"

_ENGLISH = "en_core_web_sm"
_SAMPLE_RATE = 24_000
_SAFE, _PICKLES = ".safetensors", (".pt", ".pth", ".bin")
_FILE = re.compile(r"(?P<stem>[A-Za-z0-9_-]{1,64})(?P<ending>\.safetensors|\.pt|\.bin)")
_NAMED = re.compile(r"(?P<language>[abefhijpz])(?P<gender>[fm])_(?P<name>[a-z0-9_]+)")
# Source: VOICES.md in the repository of Kokoro-82M.
_LANGUAGES = {
    "a": "en",
    "b": "en",
    "e": "es",
    "f": "fr",
    "h": "hi",
    "i": "it",
    "j": "ja",
    "p": "pt",
    "z": "zh",
}
_GENDERS: dict[str, Gender] = {"f": "female", "m": "male"}


def read(folder: ModelFolder) -> ModelFacts | None:
    """As `Reader.read`."""
    names = folder.names()
    if "voices" not in names or not _is_kokoro(folder, names):
        return None
    files = folder.names("voices")
    # Sorted, so that of one voice in two formats the safe one stays.
    known = [found for name in files if (found := _FILE.fullmatch(name))]
    voices = {found["stem"]: found["ending"] for found in sorted(known, key=lambda one: one["ending"] == _SAFE)}
    english = is_installed(_ENGLISH)
    speakers = tuple(_speaker(folder, stem, voices[stem], english=english) for stem in sorted(voices)[:MAX_SPEAKERS])
    return ModelFacts(
        speakers=speakers, sample_rate=_SAMPLE_RATE, problem=_problem(folder, names), notes=_notes(files, len(voices))
    )


def _is_kokoro(folder: ModelFolder, names: list[str]) -> bool:
    if any(name.lower().startswith("kokoro") and name.endswith((_SAFE, ".onnx", *_PICKLES)) for name in names):
        return True
    config = folder.read_json("config.json") or {}
    return "istftnet" in config or config.get("model_type") == "style_text_to_speech_2"


def _speaker(folder: ModelFolder, stem: str, ending: str, *, english: bool) -> Speaker:
    found = _NAMED.fullmatch(stem)
    problem: str | None
    if found and found["language"] in "ab" and not english:
        problem = f"English needs {_ENGLISH}: python -m spacy download {_ENGLISH}"
    elif ending == _SAFE:
        problem = folder.weights_problem(f"voices/{stem}{ending}")
    else:
        problem = f"voices/{stem}{ending} may be a pickle, which can run code: convert it to {stem}{_SAFE}"
    return Speaker(
        speaker=stem,
        slug=slug(f"kokoro {stem}"),
        name=found["name"].replace("_", " ").title() if found else None,
        gender=_GENDERS[found["gender"]] if found else None,
        language=_LANGUAGES[found["language"]] if found else None,
        problem=problem,
    )


def _problem(folder: ModelFolder, names: list[str]) -> str | None:
    weights = [name for name in names if name.endswith(_SAFE)]
    if weights:
        if "config.json" not in names:
            return "there is no config.json; finish the download"
        return next((problem for name in weights if (problem := folder.weights_problem(name))), None)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return f"{shown(pickles[0])} is a pickle, which can run code: convert it to {_SAFE} (docs/voices.md says how)"
    return f"there is no {_SAFE} file, and nothing else is loaded; docs/voices.md says how to make one"


def _notes(files: list[str], voices: int) -> tuple[str, ...]:
    notes = []
    odd = [name for name in files if name.endswith((_SAFE, ".pt", ".bin")) and not _FILE.fullmatch(name)]
    if odd:
        notes.append(f"{len(odd)} file(s) in voices/ are left out, like {shown(odd[0])}: name them like `af_heart`")
    if voices > MAX_SPEAKERS:
        notes.append(f"only the first {MAX_SPEAKERS} of its {voices} voices are looked at")
    return tuple(notes)

"""Voice files of eSpeak NG, as far as they are read here: known keys, numbers within bounds.

Its own parser, in C, never sees a file of a model folder, only lines that were checked here. Source of the keys:
docs/voices.md of eSpeak NG 1.52.
"""

import re
from dataclasses import dataclass
from typing import cast, get_args

from engine.config.yaml import shown
from engine.voices.files import MetadataError
from engine.voices.types import Gender

LIMIT_BYTES = 4096
# Of each key: how few and how many numbers stand behind it, the lowest and the highest.
_NUMBERS = {
    "pitch": (2, 2, 30, 500),
    "formant": (2, 5, -500, 500),
    "tone": (2, 8, 0, 8000),
    "flutter": (1, 1, 0, 100),
    "roughness": (1, 1, 0, 7),
    "voicing": (1, 1, 0, 200),
    "consonants": (1, 2, 0, 200),
    "breath": (1, 8, 0, 200),
    "breathw": (1, 8, 0, 1000),
    "echo": (2, 2, 0, 250),
    "speed": (1, 1, 50, 200),
    "stressAdd": (1, 8, -200, 200),
    "stressAmp": (1, 8, 0, 60),
}
_NUMBER = re.compile(r"-?[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class VoiceFile:
    """What a voice file says. `sound`: the lines that make its sound, checked."""

    name: str | None
    gender: Gender | None
    sound: tuple[str, ...]


def read_voice_file(text: str) -> VoiceFile:
    """Read a voice file; `//` begins a comment, the model says the language. Raises `MetadataError` with the line."""
    said: dict[str, str] = {}
    sound: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        key, _, value = " ".join(line.partition("//")[0].split()).partition(" ")
        if key in {"name", "gender", "language"} and value:
            said.setdefault(key, value)
        elif key in _NUMBERS:
            sound.append(f"{key} {_numbers(key, value, number)}")
        elif key:
            known = ", ".join(("name", "language", "gender", *_NUMBERS))
            raise MetadataError(f"line {number}: the key {shown(key)} is not read here; {known} are")
    gender = said.get("gender", "").partition(" ")[0]  # an age may follow
    return VoiceFile(
        name=said.get("name"),
        gender=cast("Gender", gender) if gender in get_args(Gender) else None,
        sound=tuple(sound),
    )


def _numbers(key: str, value: str, line: int) -> str:
    few, many, low, high = _NUMBERS[key]
    words = value.split()
    good = few <= len(words) <= many and all(_NUMBER.fullmatch(word) and low <= int(word) <= high for word in words)
    if not good:
        count = few if few == many else f"{few} to {many}"
        raise MetadataError(f"line {line}: {key} takes {count} whole numbers from {low} to {high}")
    return value

"""Speaks with eSpeak NG, a formant synthesiser: at once, on any machine, understood if not beautiful.

A voice is a file of its model folder; the library is that of the package espeakng-loader (GPL-3.0-or-later).
"""

import re
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.tts import only_of
from engine.backends.tts.espeak_ng import library
from engine.backends.tts.sound import gain, stretch
from engine.errors import LoadError
from engine.voices.espeak import LIMIT_BYTES, read_voice_file
from engine.voices.files import MetadataError, ModelFolder
from engine.voices.languages import language_code, language_name
from engine.voices.numbers import spell_numbers

_MEASURED = "1 2 3 4 5 6 7 8 9 10"  # every language has words for them
# It would spell letters of other scripts by their English names. Latin ones it reads as English where they are foreign.
_SCRIPTS = {
    "am": ("ETHIOPIC", "LATIN"),
    "ti": ("ETHIOPIC", "LATIN"),
    "so": ("LATIN",),
    "om": ("LATIN",),
    "en": ("LATIN",),
}
# In these an apostrophe is a consonant, which the library drops at a word's end. After a quotation mark it closes.
_WITH_GLOTTAL_STOPS = ("so", "om")
_LAST_APOSTROPHE = re.compile(r"(?<![\w'\u2018\u2019])(\w+)['\u2019](?!\w)")


def load(folder: Path) -> "EspeakSpeech":
    files = ModelFolder(folder)
    try:
        language = language_code((files.read_json("config.json") or {}).get("language"))
    except MetadataError as error:
        raise LoadError(f"{folder.name}: {error}.") from error
    if language is None:
        raise LoadError(f"{folder.name}/config.json names no language.")
    if not library().speaks(language):
        raise LoadError(f"{folder.name}: eSpeak NG does not speak {language_name(language)}.")
    return EspeakSpeech(files, language)


class EspeakSpeech:
    """A `Synthesizer` (service.py)."""

    def __init__(self, folder: ModelFolder, language: str) -> None:
        self._folder, self._language = folder, language
        self._library = library()
        self.sample_rate = self._library.sample_rate
        self._voice = cache(self._read_voice)

    def sayable(self, text: str) -> str:
        if self._language in _WITH_GLOTTAL_STOPS:
            text = _LAST_APOSTROPHE.sub("\\1\u02bc", text)
        scripts = _SCRIPTS.get(self._language)
        return text if scripts is None else only_of(text, *scripts)

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        sound = self._voice(str(speaker))
        louder = _gain(self._language, sound)
        self._library.choose(self._language, sound)
        return stretch([self._library.speak(text, seed) * louder], self.sample_rate, speed)

    def _read_voice(self, name: str) -> tuple[str, ...]:
        try:
            content = self._folder.read(f"voices/{name}", limit_bytes=LIMIT_BYTES)
            found = None if content is None else read_voice_file(content.decode("utf-8", "replace"))
        except MetadataError as error:
            raise LoadError(f"{self._folder.name}: {error}.") from error
        if found is None:
            raise LoadError(f"{self._folder.name}: there is no voices/{name}.")
        return found.sound


@lru_cache(1000)
def _gain(language: str, sound: tuple[str, ...]) -> np.float32:
    """What makes every voice equally loud. It outlives the models, because it takes longer than a sentence."""
    library().choose(language, sound)
    return gain(library().speak(spell_numbers(_MEASURED, language), 0), library().sample_rate)

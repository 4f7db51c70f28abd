"""Speaks with eSpeak NG, a formant synthesiser: at once, on any machine, intelligible but mechanical.

A voice is a file of its model folder. The library is that of the package espeakng-loader (GPL-3.0-or-later), and so are
its data, with dictionaries of our own (pronunciation/) that its compiler makes at their first use. Written for
espeakng-loader 0.2.4, eSpeak NG 1.52.
"""

import ctypes
import logging
import os
import re
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.tts import only_of
from engine.backends.tts.sound import gain, stretch
from engine.errors import GenerationError, LoadError
from engine.voices.files import MetadataError, ModelFolder
from engine.voices.languages import language_code, language_name
from engine.voices.numbers import spell_numbers
from engine.voices.readers import VOICE_FILE_BYTES, read_voice_file

_log = logging.getLogger(__name__)

_MEASURED = "1 2 3 4 5 6 7 8 9 10"  # every language has words for them
# It would spell letters of other scripts by their English names. It reads Latin letters as English if they are foreign.
_SCRIPTS = {
    "am": ("ETHIOPIC", "LATIN"),
    "ti": ("ETHIOPIC", "LATIN"),
    "so": ("LATIN",),
    "om": ("LATIN",),
    "en": ("LATIN",),
}
# In these an apostrophe is a consonant, which the library drops at a word's end. After a quotation mark it closes that.
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
            content = self._folder.read(f"voices/{name}", limit_bytes=VOICE_FILE_BYTES)
            found = None if content is None else read_voice_file(content.decode("utf-8", "replace"))
        except MetadataError as error:
            raise LoadError(f"{self._folder.name}: {error}.") from error
        if found is None:
            raise LoadError(f"{self._folder.name}: there is no voices/{name}.")
        return found.sound


@lru_cache(1000)
def _gain(language: str, sound: tuple[str, ...]) -> np.float32:
    """The factor that makes every voice equally loud. Cached beyond the models: it takes longer than a sentence."""
    library().choose(language, sound)
    return gain(library().speak(spell_numbers(_MEASURED, language), 0), library().sample_rate)


# Of espeak_ng.h and speak_lib.h
_OK = 0
_SYNCHRONOUS = 1
_UTF8 = 1
_IPA = 2
_TIED = 128
_POSITION_CHARACTER = 1
_VOLUME = 3
# Of 100: a loud vowel would be clipped otherwise; samples are made louder again as floats.
_VOLUME_PERCENT = 50
# Their phases continue from one text to the next, so the same text would never sound the same.
_STEADY = ("flutter 0", "roughness 0")
_USUAL_SPEED = "speed 100"  # else a voice without a speed of its own has that of the voice before it
_VOWEL = "a."
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@cache
def library() -> "EspeakNG":
    """Return the library, ready. Raises `LoadError`."""
    return EspeakNG()


class EspeakNG:
    """Made by `library`: one voice at a time, a piece of text in, samples out. Its state is global, so there is one."""

    def __init__(self) -> None:
        import espeakng_loader

        # Its data folder holds one more dictionary a language, and is written to by its compiler.
        self._temporary = tempfile.TemporaryDirectory(prefix="hearth-espeak-", ignore_cleanup_errors=True)
        # Some of its buffers for paths have only 40 characters, which TMPDIR alone may have.
        self._data = Path("/proc/self/fd", str(os.open(self._temporary.name, os.O_PATH)))
        for file in Path(espeakng_loader.get_data_path()).iterdir():
            (self._data / file.name).symlink_to(file)
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_ng_InitializePath(os.fsencode(self._data))
        self._must("start", self._library.espeak_ng_Initialize(None))
        self._must("start", self._library.espeak_ng_InitializeOutput(_SYNCHRONOUS, 0, None))
        self.sample_rate: int = self._library.espeak_ng_GetSampleRate()
        self._parts: list[NDArray[np.int16]] = []
        self._callback = _CALLBACK(self._take)  # the library keeps no reference
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_ng_SetParameter(_VOLUME, _VOLUME_PERCENT, 0)
        self._dictionary = cache(self._compile)
        self._chosen: tuple[str, tuple[str, ...]] | None = None

    def speaks(self, language: str) -> bool:
        """Whether there is a dictionary of a language (ISO 639-1)."""
        return language in LANGUAGES or (self._data / f"{language}_dict").exists()

    def choose(self, language: str, sound: tuple[str, ...]) -> None:
        """Set the voice: a language (ISO 639-1) and the lines of a voice file. Raises `LoadError`."""
        if self._chosen == (language, sound):
            return
        self._set_voice([*self._lines(language, self._dictionary(language)), _USUAL_SPEED, *sound, *_STEADY])
        self._chosen = (language, sound)

    def speak(self, text: str, seed: int) -> NDArray[np.float32]:
        """Say a text in the voice that was chosen: mono, without the silence at its end. Raises `GenerationError`."""
        # Its filters still ring from the last text: after a vowel the same text gives the same sound.
        for piece in (_VOWEL, text):
            self._parts.clear()
            self._library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
            data = piece.encode() + b"\0"
            status = self._library.espeak_ng_Synthesize(
                data, ctypes.c_size_t(len(data)), 0, _POSITION_CHARACTER, 0, _UTF8, None, None
            )
            if status != _OK:
                raise GenerationError("The voice failed at a sentence of this text. Write it in other words.")
        samples = np.concatenate([np.zeros(0, np.int16), *self._parts])
        heard = np.flatnonzero(np.abs(samples) > 8)
        last = min(len(samples), heard[-1] + self.sample_rate // 50) if len(heard) else 0
        return samples[:last].astype(np.float32) / (2**15 * _VOLUME_PERCENT / 100)

    def choose_language(self, name: str) -> None:
        """Set a language by the library's own name, like en-us, for `phonemes`. Raises `LoadError`."""
        self._chosen = None
        self._must("take a language", self._library.espeak_ng_SetVoiceByName(name.encode()))

    def phonemes(self, text: str, *, tie: str = "") -> str:
        """Return a text's phonemes in IPA, with spaces between words; marks of another language are in brackets.

        `tie` is put between the letters of one phoneme.
        """
        mode = _IPA | (_TIED | ord(tie) << 8 if tie else 0)
        place = ctypes.c_char_p(text.encode())
        clauses = []
        while place.value is not None:
            said = self._library.espeak_TextToPhonemes(ctypes.byref(place), _UTF8, mode)
            clauses.append(said.decode("utf-8", "replace"))
        return " ".join(" ".join(clauses).split())

    def _take(self, samples: Any, count: int, _events: int) -> int:
        if samples and count:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def _compile(self, language: str) -> str | None:
        """Make the dictionary of a language of which we have one, and return its name."""
        if language not in LANGUAGES:
            return None
        name = f"hearth-{language}"
        for kind, content in _sources(language).items():
            (self._data / f"{name}_{kind}").write_text(content, encoding="utf-8")
        # Phonemes are compiled to numbers of the table that the voice speaks with.
        self._set_voice(self._lines(_PHONEME_TABLES.get(language, language), None))
        log = self._data / f"{name}.log"
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        file = ctypes.c_void_p(libc.fopen(os.fsencode(log), b"w"))
        try:
            status = self._library.espeak_ng_CompileDictionary(
                os.fsencode(f"{self._data}/"), name.encode(), file, 0, None
            )
        finally:
            libc.fclose(file)
        if status != _OK:
            _log.error("eSpeak NG could not compile its dictionary of %s: %s", language, log.read_text("utf-8")[-2000:])
        self._must("compile a dictionary", status)
        return name

    def _lines(self, language: str, dictionary: str | None) -> list[str]:
        lines = ["name hearth", f"language {language}"]
        if dictionary is not None:
            table = _PHONEME_TABLES.get(language, language)
            lines += [f"phonemes {table}", f"dictionary {dictionary}", *_OPTIONS.get(language, ())]
        return lines

    def _set_voice(self, lines: list[str]) -> None:
        self._chosen = None
        file = self._data / "voice"
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
        self._must("take a voice", self._library.espeak_ng_SetVoiceByFile(os.fsencode(file)))

    def _must(self, what: str, status: int) -> None:
        if status != _OK:
            raise LoadError(f"eSpeak NG could not {what} (status {status & 0xFFFFFFFF:#x}). Run ./scripts/setup again.")


# How to read languages that eSpeak NG does not know, or not well: sources of dictionaries for its compiler. Rules of
# letters are in `<language>_rules` (those of Ethiopic letters are made below), words in `<language>_list`; both in the
# format of eSpeak NG's docs/dictionary.md.
_PRONUNCIATION = Path(__file__).parent / "pronunciation"
LANGUAGES = ("am", "so", "ti", "om")
# The library has no table of Somali's phonemes. Arabic's has both pharyngeals, ħ and ʕ, and a retroflex-like d.
_PHONEME_TABLES = {"so": "ar"}
# What eSpeak NG knows of the other languages by itself. 2: stress on the last syllable but one.
_OPTIONS = {"so": ("stressRule 2", "words 0 1")}


def _sources(language: str) -> dict[str, str]:
    """Return the `rules` and the `list` of one of `LANGUAGES`."""
    rules = _PRONUNCIATION / f"{language}_rules"
    return {
        "rules": rules.read_text("utf-8") if rules.is_file() else _ethiopic_rules(language),
        "list": (_PRONUNCIATION / f"{language}_list").read_text("utf-8"),
    }


# Rules of Ethiopic letters for Amharic and Tigrinya, made from a table: each letter is a consonant with a vowel.
# The sixth form of a letter stands for the consonant with ɨ or alone, and the spelling does not say which. It is
# decided here from left to right: ɨ where the consonant would begin a syllable with another one (a cluster), none at a
# word's end. Source of that: Baye Yimam's and Hayward's accounts of Amharic epenthesis, as Wikipedia, "Amharic", sums
# them up. Doubled consonants are not written either; the lists of words have the commonest.

# In eSpeak NG's names of phonemes. x? and ts? are ejectives that its tables lack: the sound, then a glottal stop.
_VOWELS = ("@", "u", "i", "a", "e", "y", "o")
_SIXTH, _EIGHTH = 5, 7
_LONGEST_RUN = 5

# The first letter of each row of eight, as Unicode has them.
_ROWS = """
ሀ h, ለ l, ሐ h, መ m, ሠ s, ረ r, ሰ s, ሸ S, ቀ k`, ቐ k`, በ b, ቨ v, ተ t, ቸ tS, ኀ h, ነ n, ኘ n^, አ ?, ከ k, ኸ h, ወ w, ዐ ?,
ዘ z, ዠ Z, የ j, ደ d, ዸ d, ጀ dZ, ገ g, ጘ N, ጠ t`, ጨ tS`, ጰ p`, ጸ ts?, ፀ ts?, ፈ f, ፐ p
"""  # noqa: RUF001  # letters are meant
_TIGRINYA_ROWS = "ሐ X, ኀ X, ቐ x?, ኸ x, ዐ A"  # noqa: RUF001
# Rows of the same consonants with w, which lack the second and the seventh form.
_ROUNDED = {"ቈ": "ቀ", "ቘ": "ቐ", "ኈ": "ኀ", "ኰ": "ከ", "ዀ": "ኸ", "ጐ": "ገ"}
_WITH_YA = {"ፘ": "r", "ፙ": "m", "ፚ": "f"}
# After these the first form sounds like the fourth.
_LIKE_FOURTH = {"am": "ሀሐኀአዐ", "ti": "ሐዐ"}
# At a word's end ɨ stands between a consonant and one that is more of a vowel: kɨfɨl, but k'ulf.
_LIQUIDS, _NASALS, _GLIDES = "ለረ", "መነኘ", "ወየ"


def _ethiopic_rules(language: str) -> str:
    """Return the rules of `am` or `ti`, grouped by the first two bytes of the letters as the compiler wants them."""
    consonants = _rows(_ROWS) | (_rows(_TIGRINYA_ROWS) if language == "ti" else {})
    consonants |= {first: f"{consonants[plain]}w" for first, plain in _ROUNDED.items()}
    groups: dict[str, list[str]] = {}
    for first, consonant in consonants.items():
        for form, vowel in enumerate(_VOWELS):
            letter = chr(ord(first) + form)
            if form == _SIXTH:
                said = _of_sixth(letter, first, consonant)
            else:
                said = [f"{letter} {consonant}{'a' if not form and first in _LIKE_FOURTH[language] else vowel}"]
            groups.setdefault(_group(letter), []).extend(said)
        if first not in _ROUNDED:
            letter = chr(ord(first) + _EIGHTH)
            groups.setdefault(_group(letter), []).append(f"{letter} {consonant}{'@' if first == 'አ' else 'wa'}")
    for letter, consonant in _WITH_YA.items():
        groups.setdefault(_group(letter), []).append(f"{letter} {consonant}ja")
    parts = [f".L01 {_sixths(''.join(consonants))}", f".L02 {_sixths(_LIQUIDS + _NASALS + _GLIDES)}"]
    parts += [f".L03 {_sixths(_LIQUIDS + _NASALS)}", f".L04 {_sixths(_NASALS)}"]
    parts += [f".group {group}\n" + "\n".join(lines) for group, lines in groups.items()]
    return "\n\n".join([*parts, ""])


def _rows(rows: str) -> dict[str, str]:
    return dict(pair.split() for pair in rows.split(","))


def _of_sixth(letter: str, first: str, consonant: str) -> list[str]:
    """With ɨ or without, by how many letters of the sixth form are before it, at the word's beginning or not."""
    alone, with_vowel = f"{letter} {consonant}", f"{letter} {consonant}y"
    lines = [alone, f"_) {with_vowel}"]
    for before in range(1, _LONGEST_RUN):
        run = "L01" * before
        lines.append(f"{run}) {with_vowel if before % 2 else alone}")
        lines.append(f"_{run}) {alone if before % 2 else with_vowel}")
        lines += [f"{start}{run}) {letter} (_ {consonant}" for start in ("", "_")]
    # L02 are all that may follow, L03 those without glides, L04 the nasals.
    group = "L04" if first in _LIQUIDS else "L03" if first in _NASALS else "" if first in _GLIDES else "L02"
    if group:
        lines.append(f"{letter} ({group}_++++ {consonant}y")
    return lines


def _sixths(firsts: str) -> str:
    return " ".join(chr(ord(first) + _SIXTH) for first in firsts)


def _group(letter: str) -> str:
    return f"0x{letter.encode()[:2].hex()}"

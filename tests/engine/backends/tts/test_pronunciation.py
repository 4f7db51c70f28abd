"""What the voices of eSpeak NG make of written words, in the phonemes that the library reports: 100 of each language.

The tables are written from phonologies (docs/voices.md names them), not from what the library says.
"""

from pathlib import Path

import pytest
import yaml
from espeak_parts import TEXTS, folder_of

pytest.importorskip("espeakng_loader", reason="set up with --no-espeak")

from engine.backends.tts import espeak
from engine.backends.tts.service import loaded
from engine.voices.text import speakable

WORDS = Path(__file__).parent / "words"
LANGUAGES = ("am", "so", "ti", "om", "en")
CALLED: dict[str, dict[str, str]] = yaml.safe_load((WORDS / "called.yaml").read_text("utf-8"))


def phonemes(language: str, text: str) -> str:
    library = espeak.library()
    library.choose(language, ())
    said = library.phonemes(loaded("espeak", folder_of(language)).sayable(text))
    for sign, meant in (CALLED["all"] | CALLED[language]).items():
        said = said.replace(sign, meant)
    return said


def table(language: str) -> dict[str, str]:
    return dict(line.split() for line in (WORDS / f"{language}.txt").read_text("utf-8").splitlines())


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_hundred_words_are_said_as_phonologies_have_them(language: str):
    expected = table(language)
    assert len(expected) >= 100
    said = {word: phonemes(language, word) for word in expected}
    wrong = {word: (said[word], expected[word]) for word in expected if said[word] != expected[word]}
    assert wrong == {}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_word_of_a_text_is_heard(language: str):
    for text in TEXTS[language]:
        for piece in speakable(text, language):
            words = [word for word in piece.text.split() if any(map(str.isalpha, word))]
            for word in words:
                assert phonemes(language, word), word
            # Words of one consonant join their neighbour.
            assert len(phonemes(language, piece.text).split()) >= len(words) - 1


@pytest.mark.parametrize("language", espeak.LANGUAGES)
def test_every_letter_of_a_language_has_a_sound(language: str):
    letters = "abcdefghijklmnopqrstuvwxyz" if language in {"so", "om"} else map(chr, range(0x1200, 0x1358))
    for letter in letters:
        if not letter.isalpha() or letter in "ቧሇቇኇኯዏዯጏ":
            continue
        assert phonemes(language, f"{letter}{letter}"), letter


def test_latin_words_in_an_ethiopic_text_are_english():
    assert phonemes("am", "የhello") != ""
    assert "(en)" in phonemes("am", "ሰላም computer")

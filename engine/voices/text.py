"""What a text is made into before a voice speaks it: sentences, with numbers in words. Letters are the voice's."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

from engine.voices.numbers import spell_numbers
from engine.voices.sentences import ends_with_break, parts_of, sentences_in

# About as much as a voice says in one breath; the first piece is shorter, because somebody waits for it.
_LONGEST_CHARACTERS = 200
_LONGEST_FIRST_CHARACTERS = 100
_PARAGRAPH_PAUSE_SECONDS = 0.5
_SENTENCE_PAUSE_SECONDS = 0.3
_CLAUSE_PAUSE_SECONDS = 0.15

# Typed for ። on keyboards that lack it; the single ፡ stands between words.
_TWO_WORDSPACES = re.compile("፡፡|::")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]")
_LOST_SPACE = re.compile(r" +(?=[,.;:!?…።፣፤፥፦፧፨])")


@dataclass(frozen=True, slots=True)
class Piece:
    """What is spoken in one go. `pause_seconds`: the silence after it, at the voice's own speed."""

    text: str
    pause_seconds: float


def speakable(text: str, language: str) -> list[Piece]:
    """Return the pieces in which `text` is spoken in a language (ISO 639-1); none if it is blank.

    A piece is a sentence, or a part of at most about 200 characters of a long one.
    """
    text = _CONTROLS.sub(" ", unicodedata.normalize("NFC", text))
    text = _TWO_WORDSPACES.sub("።", text).replace("፡", " ")
    pieces: list[Piece] = []
    for line in text.splitlines():
        for sentence in sentences_in(line):
            pieces += _pieces_of(_LOST_SPACE.sub("", spell_numbers(sentence, language)), first=not pieces)
        if pieces:
            pieces[-1] = replace(pieces[-1], pause_seconds=_PARAGRAPH_PAUSE_SECONDS)
    if pieces:
        pieces[-1] = replace(pieces[-1], pause_seconds=0.0)
    return pieces


def _pieces_of(sentence: str, *, first: bool) -> list[Piece]:
    sentence = " ".join(sentence.split())
    parts = parts_of(sentence, _LONGEST_FIRST_CHARACTERS if first else _LONGEST_CHARACTERS)
    if first and len(parts) > 1:
        rest = sentence[len(parts[0]) :].lstrip()
        parts = [parts[0], *parts_of(rest, _LONGEST_CHARACTERS)]
    inner = [Piece(part, _CLAUSE_PAUSE_SECONDS if ends_with_break(part) else 0.0) for part in parts[:-1]]
    return [*inner, *(Piece(part, _SENTENCE_PAUSE_SECONDS) for part in parts[-1:])]

"""What a text is made into before a voice speaks it: sentences, with numbers in words. Letters are the voice's."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.voices.numbers import spell_numbers, spell_numerals
from engine.voices.signs import spell_signs

# About as much as a voice says in one breath; the first piece is shorter, because a listener waits for it.
_LONGEST_CHARACTERS = 200
_LONGEST_FIRST_CHARACTERS = 100
_PARAGRAPH_PAUSE_SECONDS = 0.5
_SENTENCE_PAUSE_SECONDS = 0.3
_CLAUSE_PAUSE_SECONDS = 0.15

# Typed for ። on keyboards that lack it; the single ፡ stands between words.
_TWO_WORDSPACES = re.compile("፡፡|::")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]")
_SHAPES = frozenset({"<font>", "<wide>", "<narrow>", "<circle>", "<compat>", "<square>"})
_LOST_SPACE = re.compile(r" +(?=[,.;:!?…።፣፤፥፦፧፨])")

# Ethiopic and CJK marks end a sentence by themselves, the others before a space.
_END = re.compile(
    r"(?:[.!?\u2026\u061f]+[\"'\u201d\u2019\u00bb)\]]*(?=\s|$)|[።፧፨\u3002\uff01\uff1f]+[\"'\u201d\u2019\u00bb)\]]*)"
)
_BREAK = re.compile(r"[,;:\u2013\u2014\u060c](?=\s)|[፣፤፥፦]")
_OPENING = "\"'([\u201c\u2018\u00ab"
# J. S., U.S, ዓ.ም; but "So do I." ends.
_INITIALS = re.compile(r"(?!I$)[^\W\d_]|[^\W\d_]{1,3}(?:\.[^\W\d_]{1,3})+")
_ABBREVIATIONS = frozenset(
    {
        *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "rev", "gen", "col", "capt", "md", "inc", "ltd", "co"),
        *("corp", "dept", "vs", "approx", "fig", "vol", "e.g", "i.e", "cf", "ca", "al"),
    }
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is spoken in one go. `pause_seconds`: the silence after it, at the voice's own speed."""

    text: str
    pause_seconds: float


def speakable(text: str, language: str) -> Iterator[Piece]:
    """Yield the pieces in which `text` is spoken in a language (ISO 639-1); none if it is blank.

    A piece is a sentence, or a part of at most about 200 characters of a long one. Each is made when it is asked for:
    the first of a page does not wait for the others.
    """
    text = _CONTROLS.sub(" ", "".join(map(_plain, unicodedata.normalize("NFC", text))))
    text = _TWO_WORDSPACES.sub("።", text).replace("፡", " ")
    last: Piece | None = None
    for line in text.splitlines():
        for sentence in _sentences_in(spell_signs(spell_numerals(line), language)):
            for piece in _pieces_of(_LOST_SPACE.sub("", spell_numbers(sentence, language)), first=last is None):
                if last is not None:
                    yield last
                last = piece
        if last is not None:
            last = replace(last, pause_seconds=_PARAGRAPH_PAUSE_SECONDS)
    if last is not None:
        yield replace(last, pause_seconds=0.0)


def _plain(character: str) -> str:
    """Return a letter or number in another shape (wide, bold, a ligature, in a circle) as those that it stands for."""
    if character.isascii() or unicodedata.category(character)[0] not in "LN":
        return character
    shape = unicodedata.decomposition(character).partition(" ")[0]
    return unicodedata.normalize("NFKC", character) if shape in _SHAPES else character


def _pieces_of(sentence: str, *, first: bool) -> list[Piece]:
    sentence = " ".join(sentence.split())
    parts = _parts_of(sentence, _LONGEST_FIRST_CHARACTERS if first else _LONGEST_CHARACTERS)
    # After a comma a speaker would breathe.
    inner = [Piece(part, _CLAUSE_PAUSE_SECONDS if _BREAK.match(f"{part[-1:]} ") else 0.0) for part in parts[:-1]]
    return [*inner, *(Piece(part, _SENTENCE_PAUSE_SECONDS) for part in parts[-1:])]


def _sentences_in(line: str) -> list[str]:
    """Return the sentences of a line, without blanks around them; none is empty."""
    cuts = [found.end() for found in _END.finditer(line) if _ends(line, found)]
    return [sentence for start, end in pairwise([0, *cuts, len(line)]) if (sentence := line[start:end].strip())]


def _parts_of(sentence: str, longest: int) -> list[str]:
    """Return `sentence` in parts, the first of at most `longest` characters; cut at a break if possible."""
    parts = []
    while len(sentence) > longest:
        cut = _cut(sentence, longest)
        parts.append(sentence[:cut].rstrip())
        sentence, longest = sentence[cut:].lstrip(), _LONGEST_CHARACTERS
    return [*parts, sentence] if sentence else parts


def _ends(line: str, mark: re.Match[str]) -> bool:
    """Whether a sentence ends there: a full stop may belong to an abbreviation."""
    if not mark[0].startswith((".", "\u2026")):
        return True
    if line[mark.end() :].lstrip()[:1].islower():
        return False
    word = (line[: mark.start()].split() or [""])[-1].lstrip(_OPENING)
    return not (mark[0] == "." and (word.lower() in _ABBREVIATIONS or _INITIALS.fullmatch(word)))


def _cut(sentence: str, longest: int) -> int:
    """Where a break is, but not too near the beginning; else between words; else right there."""
    breaks = [found.end() for found in _BREAK.finditer(sentence, 0, longest)]
    if breaks and breaks[-1] > longest // 4:
        return breaks[-1]
    space = sentence.rfind(" ", 1, longest + 1)
    return space if space > 0 else longest

"""Cuts a text into sentences, and long sentences into parts, to be spoken one after the other."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def sentences_in(line: str) -> Iterator[str]:
    """Yield the sentences of a line, without blanks around them; none is empty."""
    cuts = [found.end() for found in _END.finditer(line) if _ends(line, found)]
    for start, end in pairwise([0, *cuts, len(line)]):
        if sentence := line[start:end].strip():
            yield sentence


def parts_of(sentence: str, longest: int) -> list[str]:
    """Return `sentence` in parts of at most `longest` characters, cut at a break if possible, else between words."""
    parts = []
    while len(sentence) > longest:
        cut = _cut(sentence, longest)
        parts.append(sentence[:cut].rstrip())
        sentence = sentence[cut:].lstrip()
    return [*parts, sentence] if sentence else parts


def ends_with_break(part: str) -> bool:
    """Whether a speaker would breathe after it, like after a comma."""
    return _BREAK.match(part[-1:] + " ") is not None


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

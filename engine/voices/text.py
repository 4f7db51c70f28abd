"""Prepares a text for a voice: sentences, with numbers and signs in words.

The voice reads letters. The words for signs are in signs.yaml, those for numbers in numbers.py.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from num2words import num2words

from engine.voices.numbers import spell_numbers, spell_numerals

# About one breath; the first piece is shorter, because a listener waits for it.
_LONGEST_CHARACTERS = 200
_LONGEST_FIRST_CHARACTERS = 100
_PARAGRAPH_PAUSE_SECONDS = 0.5
_SENTENCE_PAUSE_SECONDS = 0.3
_CLAUSE_PAUSE_SECONDS = 0.15

# Typed for ። on keyboards that lack it; a single ፡ separates words.
_TWO_WORDSPACES = re.compile("፡፡|::")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]")
_SHAPES = frozenset({"<font>", "<wide>", "<narrow>", "<circle>", "<compat>", "<square>"})
_LOST_SPACE = re.compile(r" +(?=[,.;:!?…።፣፤፥፦፧፨])")

# Ethiopic, Indic, Khmer, Burmese, Urdu and CJK marks end a sentence by themselves, the others before a space.
_END = re.compile(
    r"(?:[.!?\u2026\u061f]+[\"'\u201d\u2019\u00bb)\]]*(?=\s|$)|[።፧፨\u0964\u0965\u17d4\u104b\u06d4\u3002\uff01\uff1f]+[\"'\u201d\u2019\u00bb)\]]*)"
)
_BREAK = re.compile(r"[,;:\u2013\u2014\u060c](?=\s)|[፣፤፥፦\u3001\uff0c\uff1a\uff1b]")
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
    """A part of a text that is spoken at once. `pause_seconds`: the silence after it, at the voice's own speed."""

    text: str
    pause_seconds: float


def speakable(text: str, language: str) -> Iterator[Piece]:
    """Yield the pieces in which `text` is spoken in a language (ISO 639-1); none if it is blank.

    A piece is a sentence, or a part of at most about 200 characters of a long one. Each is made when it is needed: the
    first of a page does not wait for the others.
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
    """Return a letter or number in another shape (wide, bold, a ligature, in a circle) as plain characters."""
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
    """Return the sentences of a line, stripped; none is empty."""
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
    """Whether a sentence ends at a mark: a full stop may belong to an abbreviation."""
    if not mark[0].startswith((".", "\u2026")):
        return True
    if line[mark.end() :].lstrip()[:1].islower():
        return False
    word = (line[: mark.start()].split() or [""])[-1].lstrip(_OPENING)
    return not (mark[0] == "." and (word.lower() in _ABBREVIATIONS or _INITIALS.fullmatch(word)))


def _cut(sentence: str, longest: int) -> int:
    """Return where to cut: at a break that is not too near the beginning, else between words, else at `longest`."""
    breaks = [found.end() for found in _BREAK.finditer(sentence, 0, longest)]
    if breaks and breaks[-1] > longest // 4:
        return breaks[-1]
    space = sentence.rfind(" ", 1, longest + 1)
    return space if space > 0 else longest


# Signs for words: dates, times, money, units, abbreviations. Their numbers stay figures, which `spell_numbers` says
# later. Texts in languages that are not in signs.yaml stay unchanged.
_MAYBE_MINUS = r"(?:(?<![^\s(\[])[-\u2212])?"  # no hyphen within a word
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
# Ethiopic prepositions are joined to a number: በ12.
_NOT_IN_A_NUMBER = r"(?<![A-Za-z0-9_.,:/-])"
_ISO_DATE = re.compile(_NOT_IN_A_NUMBER + r"(?P<y>\d{4})-(?P<m>\d{1,2})-(?P<d>\d{1,2})(?![\w-])(?!\.\d)")
# The day comes first, as everywhere in these countries.
_DATE = re.compile(
    _NOT_IN_A_NUMBER + r"(?P<d>\d{1,2})(?P<mark>[/.])(?P<m>\d{1,2})(?P=mark)(?P<y>\d{4})(?![\w/])(?!\.\d)"
)
_CLOCK = re.compile(_NOT_IN_A_NUMBER + r"(?P<h>[01]?\d|2[0-3]):(?P<min>[0-5]\d)(?![\w:])")
_RANGE = re.compile(_NOT_IN_A_NUMBER + r"(\d{1,4})\s?[-\u2013]\s?([1-9]\d{0,3})(?![\w/:-])(?![.,]\d)")
_PHONE = re.compile(r"(?<!\w)\+\d(?:[ -]?\d){6,14}(?!\w)")
_DECADE = re.compile(_NOT_IN_A_NUMBER + r"((?:1[1-9]|20)\d0)s\b")
_ETHIOPIAN_ERA = "ዓ.ም"
_LONGEST_MONTH = 31


_Step: TypeAlias = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def spell_signs(text: str, language: str) -> str:
    """Return `text` with dates, times, money, units, abbreviations and signs in words of a language (ISO 639-1)."""
    for pattern, said in _steps(language):
        text = pattern.sub(said, text)
    return text


@cache
def _words() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "signs.yaml").read_text("utf-8"))
    return loaded


@cache
def _steps(language: str) -> tuple[_Step, ...]:
    """The patterns of a language, each with its replacement; applied one after the other."""
    words = _words().get(language)
    if words is None:
        return ()
    before = rf"(?:(?i:{words['clock_word']})\s+)?" if "clock_word" in words else ""
    numerals = "|".join(map(re.escape, sorted(words["currencies"], key=len, reverse=True)))
    units = "|".join(map(re.escape, sorted(words["units"], key=len, reverse=True)))
    scale = "|".join([r"\s(?:[mb]illion|trillion)", *words.get("scales", ())])
    sign = rf"(?P<minus>{_MAYBE_MINUS})(?<!\w)(?P<sign>{numerals})"
    money_before = rf"{sign}\s?(?P<n>{_NUMBER})(?P<scale>{scale})?(?!\w|\.\d)"
    signed = rf"{_NOT_IN_A_NUMBER}(?P<minus>{_MAYBE_MINUS})(?P<n>{_NUMBER})"
    money_after = rf"{signed}(?P<scale>)\s?(?P<sign>{numerals})(?!\w)"
    last_dot = r"(?:(?<=\w\.\w)\.)?"  # of ኪ.ሜ.
    amount = rf"(?<![$€£]){signed}\s?(?P<unit>{units}){last_dot}(?![\w/])"
    steps: list[_Step] = [
        *([(_DECADE, _decade)] if language == "en" else ()),
        (_PHONE, lambda found: " ".join(filter(str.isdigit, found[0]))),
        (_ISO_DATE, lambda found: _date(found, words)),
        (_DATE, lambda found: _date(found, words)),
        (re.compile(before + _CLOCK.pattern), lambda found: _time(found, words)),
        (_RANGE, lambda found: f"{found[1]} {words['to']} {found[2]}"),
        (re.compile(money_before), lambda found: _money(found, words)),
        (re.compile(money_after), lambda found: _money(found, words)),
        (re.compile(amount), lambda found: _amount(_signed(found), words["units"][found["unit"]], words)),
        *_abbreviations(words["abbreviations"], words.get("prefixes", ()), ends=False),
        *_abbreviations(words.get("ends", {}), (), ends=True),
        *_abbreviations(words.get("before_figures", {}), (), ends=False, then=r"(?=\s?\d)"),
    ]
    known = "".join(map(re.escape, words["signs"]))
    steps.append((re.compile(rf"(?<=\s)[{known}](?=\s)|(?<=\w)[&@](?=\w)"), lambda f: f" {words['signs'][f[0]]} "))
    return tuple(steps)


def _date(found: re.Match[str], words: dict[str, Any]) -> str:
    day, month = int(found["d"]), int(found["m"])
    months = words["months"]
    if "ethiopian_months" in words and found.string[found.end() :].lstrip().startswith(_ETHIOPIAN_ERA):
        months = words["ethiopian_months"]
    if not (1 <= day <= _LONGEST_MONTH and 1 <= month <= len(months)):
        return found[0]
    if months[0] == "January":
        return str(words["date"].format(d=f"{day}{_ending(day)}", m=months[month - 1], y=_english_year(found["y"])))
    return str(words["date"].format(d=day, m=months[month - 1], y=int(found["y"])))


def _ending(day: int) -> str:
    return "th" if day in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def _english_year(year: str) -> str:
    return str(num2words(int(year), to="year")).replace("-", " ")


def _decade(found: re.Match[str]) -> str:
    return re.sub("y?$", lambda last: "ies" if last[0] else "s", _english_year(found[1]), count=1)


def _time(found: re.Match[str], words: dict[str, Any]) -> str:
    hours, minutes = int(found["h"]), int(found["min"])
    if not minutes:
        return str(words["hour"].format(h=hours))
    # In English a nought is heard: nine oh five.
    shown = f"oh {minutes}" if "clock_word" not in words and minutes < 10 else minutes
    return str(words["clock"].format(h=hours, min=shown))


def _money(found: re.Match[str], words: dict[str, Any]) -> str:
    whole, _, decimals = _signed(found).partition(".")
    unit, cents = words["currencies"][found["sign"]], words["cents"].get(found["sign"])
    if scale := found["scale"]:
        return _amount(f"{_signed(found)} {words.get('scales', {}).get(scale, scale.strip())}", unit, words)
    if len(decimals) == 2 and cents is not None:
        small = f" {_amount(str(int(decimals)), cents, words)}" if int(decimals) else ""
        return _amount(whole, unit, words) + small
    return _amount(_signed(found), unit, words)


def _signed(found: re.Match[str]) -> str:
    return str(found["minus"] + found["n"])


def _amount(number: str, unit: str | list[str], words: dict[str, Any]) -> str:
    name = unit if isinstance(unit, str) else unit[number.lstrip("-\u2212") != "1"]
    return str(words["amount"].format(n=number, unit=name))


def _abbreviations(
    known: dict[str, str], prefixes: Iterable[str], *, ends: bool, then: str = r"(?![\w/])"
) -> list[_Step]:
    """Steps for abbreviations. One that may end a sentence (`ends`) keeps its full stop before a new one or the end."""
    if not known:
        return []
    names = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    # The last dot of a dotted one is optional: ዓ.ም and ዓ.ም.
    before = "|".join(prefixes)
    pattern = re.compile(rf"(?<![\w/.])(?P<before>{before})?(?P<name>{names})(?P<rest>\.?){then}")

    def said(found: re.Match[str]) -> str:
        after = found.string[found.end() :].lstrip()
        stop = "." if ends and (not after or after[0].isupper()) else ""
        return f"{found['before'] or ''}{known[found['name']]}{stop}"

    return [(pattern, said)]

"""What stands for words in writing: dates, times, money, units, abbreviations, signs. Their numbers stay figures.

The words of each language are in signs.yaml; numbers.py says the figures afterwards. Other languages stay as they are.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from num2words import num2words

_MAYBE_MINUS = r"(?:(?<![^\s(\[])[-\u2212])?"  # no hyphen within a word
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
# Ethiopic prepositions stand right before a number: በ12.
_NOT_IN_A_NUMBER = r"(?<![A-Za-z0-9_.,:/-])"
_ISO_DATE = re.compile(_NOT_IN_A_NUMBER + r"(?P<y>\d{4})-(?P<m>\d{1,2})-(?P<d>\d{1,2})(?![\w-])(?!\.\d)")
# The day comes first, as everywhere in these countries.
_DATE = re.compile(
    _NOT_IN_A_NUMBER + r"(?P<d>\d{1,2})(?P<mark>[/.])(?P<m>\d{1,2})(?P=mark)(?P<y>\d{4})(?![\w/])(?!\.\d)"
)
_CLOCK = re.compile(_NOT_IN_A_NUMBER + r"(?P<h>[01]?\d|2[0-3]):(?P<min>[0-5]\d)(?![\w:])")
_RANGE = re.compile(_NOT_IN_A_NUMBER + r"(\d{1,4})\s?[-\u2013]\s?([1-9]\d{0,3})(?![\w/:-])(?![.,]\d)")
_PHONE = re.compile(r"(?<!\w)\+\d(?:[ -]?\d){6,14}(?!\w)")
_ETHIOPIAN_ERA = "ዓ.ም"
_LONGEST_MONTH = 31


_Step: TypeAlias = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]


def spell_signs(text: str, language: str) -> str:
    """Return `text` with its dates, times, money, units, abbreviations and signs in words of a language (ISO 639-1)."""
    for pattern, said in _steps(language):
        text = pattern.sub(said, text)
    return text


@cache
def _words() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "signs.yaml").read_text("utf-8"))
    return loaded


@cache
def _steps(language: str) -> tuple[_Step, ...]:
    """The patterns of a language, each with what it becomes; applied one after the other."""
    words = _words().get(language)
    if words is None:
        return ()
    before = rf"(?:(?i:{words['clock_word']})\s+)?" if "clock_word" in words else ""
    numerals = "|".join(map(re.escape, sorted(words["currencies"], key=len, reverse=True)))
    units = "|".join(map(re.escape, sorted(words["units"], key=len, reverse=True)))
    scale = r"(?P<scale>\s(?:[mb]illion|trillion)\b)?"
    money_before = rf"(?P<minus>{_MAYBE_MINUS})(?<!\w)(?P<sign>{numerals})\s?(?P<n>{_NUMBER}){scale}(?!\w)"
    signed = rf"{_NOT_IN_A_NUMBER}(?P<minus>{_MAYBE_MINUS})(?P<n>{_NUMBER})"
    money_after = rf"{signed}(?P<scale>)\s?(?P<sign>{numerals})(?!\w)"
    last_dot = r"(?:(?<=\w\.\w)\.)?"  # of ኪ.ሜ.
    amount = rf"{signed}\s?(?P<unit>{units}){last_dot}(?![\w/])"
    steps: list[_Step] = [
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
    if found["scale"]:
        return _amount(_signed(found) + found["scale"], unit, words)
    if len(decimals) == 2 and cents is not None:
        small = f" {_amount(str(int(decimals)), cents, words)}" if int(decimals) else ""
        return _amount(whole, unit, words) + small
    return _amount(_signed(found), unit, words)


def _signed(found: re.Match[str]) -> str:
    return str(found["minus"] + found["n"])


def _amount(number: str, unit: str | list[str], words: dict[str, Any]) -> str:
    name = unit if isinstance(unit, str) else unit[number.lstrip("-\u2212") != "1"]
    return str(words["amount"].format(n=number, unit=name))


def _abbreviations(known: dict[str, str], prefixes: Iterable[str], *, ends: bool) -> list[_Step]:
    """The full stop of one that `ends` a sentence stays where a new one begins, or nothing follows."""
    if not known:
        return []
    names = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    # A dotted one may have its last dot or not: ዓ.ም and ዓ.ም.
    before = "|".join(prefixes)
    pattern = re.compile(rf"(?<![\w/.])(?P<before>{before})?(?P<name>{names})(?P<rest>\.?)(?![\w/])")

    def said(found: re.Match[str]) -> str:
        after = found.string[found.end() :].lstrip()
        stop = "." if ends and (not after or after[0].isupper()) else ""
        return f"{found['before'] or ''}{known[found['name']]}{stop}"

    return [(pattern, said)]

"""Numbers as words, for voices that know letters only. How a language says them is in the module of its name.

Other languages keep their digits: the runtimes that speak those read them themselves.
"""

from __future__ import annotations

import re
import unicodedata

from engine.voices.numbers.amharic import AMHARIC
from engine.voices.numbers.english import ENGLISH
from engine.voices.numbers.oromo import OROMO
from engine.voices.numbers.somali import SOMALI
from engine.voices.numbers.tigrinya import TIGRINYA
from engine.voices.numbers.types import LARGEST, Numbers

_LANGUAGES = {"am": AMHARIC, "en": ENGLISH, "om": OROMO, "so": SOMALI, "ti": TIGRINYA}
# A sign belongs to a number only where no word or number stands before it: not in 2026-05-12.
_NUMBER = re.compile(
    r"(?P<sign>(?<![^\s(\[])[-\u2212])?(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.(?P<decimals>\d+))?"
    r"(?:(?P<percent>\s?%)|(?P<ending>[^\W\d_]+))?"
)
_BETWEEN_HOURS_AND_MINUTES = re.compile(r"(?<=\d):(?=\d)")
_NUMERAL = re.compile("[፩-፼]+")
_MOST_SIGNS = 12  # more than any number in use has; what is longer is read sign by sign
_HUNDRED, _MYRIAD = 100, 10_000


def numbers_in(language: str) -> Numbers | None:
    """Return how a language (ISO 639-1) says its numbers, None for one that is not known here."""
    return _LANGUAGES.get(language)


def spell_numbers(text: str, language: str) -> str:
    """Return `text` with its numbers in words, Ethiopic numerals among them."""
    text = _digits_for_ethiopic(text)
    numbers = numbers_in(language)
    if numbers is None:
        return text
    text = _BETWEEN_HOURS_AND_MINUTES.sub(" ", text)
    return _NUMBER.sub(lambda found: f" {_said(found, numbers)} ", text)


def _said(found: re.Match[str], numbers: Numbers) -> str:
    figures = found["whole"].replace(",", "")
    ending = found["ending"] or ""
    readable = int(figures) <= LARGEST and (figures == "0" or not figures.startswith("0"))
    if readable and not found["decimals"] and int(figures) and ending in numbers.ordinal_endings:
        return numbers.ordinal(int(figures))
    said = numbers.cardinal(int(figures)) if readable else numbers.digits(figures)
    if found["decimals"]:
        said = f"{said} {numbers.point} {numbers.digits(found['decimals'])}"
    if found["sign"]:
        said = f"{numbers.minus} {said}"
    if found["percent"]:
        return numbers.percent.format(said)
    return f"{said} {ending}"


def _digits_for_ethiopic(text: str) -> str:
    """Return `text` with each Ethiopic numeral written in digits: ፲፱፻፺፱ as 1999.

    Source: W3C, CSS Counter Styles Level 3, 7.2.1 "ethiopic-numeric".
    """
    return _NUMERAL.sub(lambda found: _digits(found[0]), text)


def _digits(numeral: str) -> str:
    if len(numeral) <= _MOST_SIGNS:
        return str(_value(numeral))
    return " ".join(str(_value(sign)) for sign in numeral)


def _value(numeral: str) -> int:
    """The signs for 100 and 10,000 multiply what stands before them, or count as one of themselves."""
    total = hundreds = ones = 0
    for sign in numeral:
        number = int(unicodedata.numeric(sign))
        if number == _HUNDRED:
            hundreds += (ones or 1) * _HUNDRED
            ones = 0
        elif number == _MYRIAD:
            total = (total + hundreds + ones or 1) * _MYRIAD
            hundreds = ones = 0
        else:
            ones += number
    return total + hundreds + ones

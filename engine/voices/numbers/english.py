"""Numbers in English, by num2words."""

from __future__ import annotations

from num2words import num2words

from engine.voices.numbers.types import Numbers


def _cardinal(number: int) -> str:
    return str(num2words(number, lang="en")).replace(",", "")


def _ordinal(number: int) -> str:
    return str(num2words(number, lang="en", to="ordinal")).replace(",", "")


ENGLISH = Numbers(
    cardinal=_cardinal,
    ordinal=_ordinal,
    ordinal_endings=("st", "nd", "rd", "th"),
    minus="minus",
    point="point",
    percent="{} percent",
)

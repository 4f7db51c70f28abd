"""Ethiopic numerals as numbers. Source: W3C, CSS Counter Styles Level 3, 7.2.1 "ethiopic-numeric"."""

from __future__ import annotations

import re
import unicodedata

_NUMERAL = re.compile("[፩-፼]+")
_MOST_SIGNS = 12  # more than any number in use has; what is longer is read sign by sign
_HUNDRED, _MYRIAD = 100, 10_000


def digits_for_ethiopic(text: str) -> str:
    """Return `text` with each Ethiopic numeral written in digits: ፲፱፻፺፱ as 1999."""
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

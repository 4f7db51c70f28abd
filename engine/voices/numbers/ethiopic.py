"""Ethiopic numerals as numbers. Source: W3C, CSS Counter Styles Level 3, 7.2.1 "ethiopic-numeric"."""

from __future__ import annotations

import re
import unicodedata

_NUMERAL = re.compile("[፩-፼]+")
_HUNDRED, _MYRIAD = 100, 10_000


def digits_for_ethiopic(text: str) -> str:
    """Return `text` with each Ethiopic numeral written in digits: ፲፱፻፺፱ as 1999."""
    return _NUMERAL.sub(lambda found: str(_value(found[0])), text)


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

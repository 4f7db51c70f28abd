"""Numbers in Amharic.

Sources: University of Wisconsin, "Resources for Self-Instructional Learners of Less Commonly Taught Languages", chapter
"Numbers" (composition); num2words 0.5.14, lang_AM.py (spelling of the words and the ordinals; its composition is not
used, it fails from 1,100 on).
"""

from __future__ import annotations

from engine.voices.numbers.types import Numbers

_ONES = ("ዜሮ", "አንድ", "ሁለት", "ሦስት", "አራት", "አምስት", "ስድስት", "ሰባት", "ስምንት", "ዘጠኝ")
_TENS = ("", "አሥራ", "ሃያ", "ሠላሳ", "አርባ", "ሃምሳ", "ስልሳ", "ሰባ", "ሰማንያ", "ዘጠና")
_TEN = "አሥር"
_SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (1000, "ሺህ"), (100, "መቶ"))
_ORDINALS = {
    "አንድ": "አንደኛ",
    "ሁለት": "ሁለተኛ",
    "ሦስት": "ሦስተኛ",
    "አራት": "አራተኛ",
    "አምስት": "አምስተኛ",
    "ስድስት": "ስድስተኛ",
    "ሰባት": "ሰባተኛ",
    "ስምንት": "ስምንተኛ",
    "ዘጠኝ": "ዘጠነኛ",
    "አሥር": "አሥረኛ",
}


def _cardinal(number: int) -> str:
    for value, name in _SCALES:
        if number >= value:
            count, rest = divmod(number, value)
            said = f"{_cardinal(count)} {name}"
            return f"{said} {_cardinal(rest)}" if rest else said
    tens, ones = divmod(number, 10)
    if not tens:
        return _ONES[ones]
    if not ones:
        return _TEN if tens == 1 else _TENS[tens]
    return f"{_TENS[tens]} {_ONES[ones]}"


def _ordinal(number: int) -> str:
    before, space, last = _cardinal(number).rpartition(" ")
    return before + space + _ORDINALS.get(last, last + "ኛ")


AMHARIC = Numbers(
    cardinal=_cardinal, ordinal=_ordinal, ordinal_endings=("ኛው", "ኛ"), minus="አሉታዊ", point="ነጥብ", percent="{} በመቶ"
)

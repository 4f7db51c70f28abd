"""Numbers in Somali, units before tens as in the north: kow iyo labaatan, 21.

Sources: M. D. Abdullahi and others at hooyo.web, "Somali course", chapter 31 (composition up to thousands); Omniglot,
"Numbers in Somali" (words, ordinals); learnsomali.com, "Somali numbers and counting" (zero, larger scales).
"""

from __future__ import annotations

from engine.voices.numbers.types import Numbers

_ONES = ("eber", "kow", "laba", "saddex", "afar", "shan", "lix", "toddoba", "siddeed", "sagaal")
_TENS = ("", "toban", "labaatan", "soddon", "afartan", "konton", "lixdan", "toddobaatan", "siddeetan", "sagaashan")
_SCALES = ((10**9, "bilyan"), (10**6, "milyan"), (1000, "kun"), (100, "boqol"))
_AND = " iyo "
_ORDINALS = {"afar": "afraad", "toban": "tobnaad", "boqol": "boqlaad"}


def _cardinal(number: int) -> str:
    """Everything is joined by iyo; a hundred or thousand alone has no number before it."""
    if number < 10:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _ONES[ones] + _AND + _TENS[tens] if ones else _TENS[tens]
    value, name = next(scale for scale in _SCALES if number >= scale[0])
    count, rest = divmod(number, value)
    said = _counted(count, name, value)
    return said + _AND + _cardinal(rest) if rest else said


def _counted(count: int, name: str, value: int) -> str:
    if count > 1:
        return f"{_cardinal(count)} {name}"
    return name if value < 10**6 else f"hal {name}"  # "one" before a noun is hal, and a million is one


def _ordinal(number: int) -> str:
    before, space, last = _cardinal(number).rpartition(" ")
    return before + space + _ORDINALS.get(last, last + ("ad" if last.endswith("a") else "aad"))


SOMALI = Numbers(
    cardinal=_cardinal,
    ordinal=_ordinal,
    ordinal_endings=("aad",),
    minus="taban",
    point="dhibic",
    percent="boqolkiiba {}",
)

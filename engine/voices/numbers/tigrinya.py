"""Numbers in Tigrinya.

Source: F. Gaim and I. Tesfamariam, "Tigrinya Number Verbalization: Rules, Algorithm, and Implementation",
arXiv:2601.03403 (January 2026): the words, what -ን joins, and the ordinals, in the masculine.
"""

from __future__ import annotations

from engine.voices.numbers.types import Numbers

_ONES = ("ዜሮ", "ሓደ", "ክልተ", "ሰለስተ", "ኣርባዕተ", "ሓሙሽተ", "ሽድሽተ", "ሸውዓተ", "ሸሞንተ", "ትሽዓተ", "ዓሰርተ")
_TENS = ("", "", "ዕስራ", "ሰላሳ", "ኣርብዓ", "ሓምሳ", "ሱሳ", "ሰብዓ", "ሰማንያ", "ቴስዓ")
_HUNDRED_ALONE, _HUNDRED_JOINED = "ሚእቲ", "ሚእት"
_SCALES = ((10**9, "ቢልዮን"), (10**6, "ሚልዮን"), (1000, "ሽሕ"))
_ORDINALS = ("", "ቀዳማይ", "ካልኣይ", "ሳልሳይ", "ራብዓይ", "ሓሙሻይ", "ሻድሻይ", "ሻውዓይ", "ሻምናይ", "ታሽዓይ", "ዓስራይ")


def _below_thousand(number: int) -> list[str]:
    """The parts that -ን may be put behind."""
    hundreds, rest = divmod(number, 100)
    parts = [f"{_ONES[hundreds]} {_HUNDRED_JOINED}"] if hundreds else []
    tens, ones = divmod(rest, 10)
    if rest > 19:
        parts += [_TENS[tens], *([_ONES[ones]] if ones else [])]
    elif rest > 10:
        parts.append(f"{_ONES[10]} {_ONES[ones]}")
    elif rest:
        parts.append(_ONES[rest])
    return parts


def _cardinal(number: int) -> str:
    if number == 0:
        return _ONES[0]
    parts: list[str] = []
    scales = 0
    ends_with_scale = False
    for value, name in _SCALES:
        count, number = divmod(number, value)
        if count:
            multiplier = _below_thousand(count)
            # One part and its scale make one part together; of several, the scale becomes a part of its own.
            parts += [f"{multiplier[0]} {name}"] if len(multiplier) == 1 else [*multiplier, name]
            scales += 1
            ends_with_scale = number == 0
    parts += _below_thousand(number)
    if len(parts) == 1:
        return _alone(parts[0])
    last = parts.pop() if ends_with_scale and scales == 1 else None
    return " ".join([f"{part}ን" for part in parts] + ([last] if last else []))


def _alone(part: str) -> str:
    return part.replace(_HUNDRED_JOINED, _HUNDRED_ALONE)


def _ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"መበል {_cardinal(number)}"


TIGRINYA = Numbers(
    cardinal=_cardinal, ordinal=_ordinal, ordinal_endings=("ይ",), minus="ኣሉታ", point="ነጥቢ", percent="{} ሚእታዊት"
)

"""Numbers in Oromo, what is counted before its number: dhibba lama, 200.

Sources: Wikibooks, "Afaan Oromo", chapter 1 (composition, fi, ordinals); languagesandnumbers.com, "Counting in Oromo"
(tens before units end in -ii); the package ethio_numbers (names of the larger scales).
"""

from __future__ import annotations

from engine.voices.numbers.types import Numbers

_ONES = ("zeeroo", "tokko", "lama", "sadii", "afur", "shan", "ja'a", "torba", "saddeet", "sagal")
_TENS = (
    *("", "kudhan", "digdama", "soddoma", "afurtama", "shantama", "jaatama"),
    *("torbaatama", "saddeettama", "sagaltama"),
)
_SCALES = ((10**9, "biliyoona"), (10**6, "miliyoona"), (1000, "kuma"), (100, "dhibba"))
_ORDINALS = {
    "tokko": "tokkoffaa",
    "lama": "lammaffaa",
    "sadii": "sadaffaa",
    "afur": "afraffaa",
    "sagal": "saglaffaa",
    "kudhan": "kurnaffaa",
}


def _cardinal(number: int) -> str:
    """What is below a hundred is joined to what is above by fi."""
    parts: list[str] = []
    for value, name in _SCALES:
        count, number = divmod(number, value)
        if count:
            parts.append(f"{name} {_cardinal(count)}")
    if number or not parts:
        parts.append(f"fi {_below_hundred(number)}" if parts else _below_hundred(number))
    return " ".join(parts)


def _below_hundred(number: int) -> str:
    tens, ones = divmod(number, 10)
    if not tens:
        return _ONES[ones]
    if not ones:
        return _TENS[tens]
    joined = "kudha" if tens == 1 else _TENS[tens].removesuffix("a") + "ii"
    return f"{joined} {_ONES[ones]}"


def _ordinal(number: int) -> str:
    before, space, last = _cardinal(number).rpartition(" ")
    return before + space + _ORDINALS.get(last, last.removesuffix("a") + "affaa")


OROMO = Numbers(
    cardinal=_cardinal,
    ordinal=_ordinal,
    ordinal_endings=("affaa", "ffaa"),
    minus="negaatiivii",
    point="tuqaa",
    percent="dhibbeentaa {}",
)

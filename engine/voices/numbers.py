"""Numbers as words, for voices that know letters only: English by num2words, four languages by our own tables.

Other languages keep their digits: the runtimes that speak those read them themselves.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from num2words import num2words

# Above it the words for scales are not settled in these languages: the digits are read instead.
LARGEST = 999_999_999_999

# A sign belongs to a number only if no word or number is before it: not in 2026-05-12.
_NUMBER = re.compile(
    r"(?P<sign>(?<![^\s(\[])[-\u2212])?(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.(?P<decimals>\d+))?"
    r"(?:(?P<percent>\s?%)|(?P<ending>[^\W\d_]+))?"
)
_BETWEEN_HOURS_AND_MINUTES = re.compile(r"(?<=\d):(?=\d)")
_NUMERAL = re.compile("[፩-፼]+")
_MOST_SIGNS = 12  # more than any number in use has; longer ones are read sign by sign
_HUNDRED, _MYRIAD = 100, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """How one language says its numbers.

    `cardinal` says 0 to `LARGEST`, `ordinal` 1 to `LARGEST`, which is written with one of `ordinal_endings`.
    `percent` has `{}` for the number.
    """

    cardinal: Callable[[int], str]
    ordinal: Callable[[int], str]
    ordinal_endings: tuple[str, ...]
    minus: str
    point: str
    percent: str

    def digits(self, figures: str) -> str:
        """Say one figure after the other, as in a telephone number."""
        return " ".join(self.cardinal(int(figure)) for figure in figures)


def spell_numbers(text: str, language: str) -> str:
    """Return `text` with its numbers in the words of a language (ISO 639-1), Ethiopic numerals among them."""
    text = spell_numerals(text)
    numbers = LANGUAGES.get(language)
    if numbers is None:
        return text
    text = _BETWEEN_HOURS_AND_MINUTES.sub(" ", text)
    return _NUMBER.sub(lambda found: f" {_said(found, numbers)} ", text)


def spell_numerals(text: str) -> str:
    """Return `text` with its Ethiopic numerals in digits."""
    return _NUMERAL.sub(_digits, text)


def _said(found: re.Match[str], numbers: Numbers) -> str:
    figures = found["whole"].replace(",", "")
    ending = found["ending"] or ""
    # By its length, because Python makes no number of thousands of figures
    readable = len(figures) <= len(str(LARGEST)) and (figures == "0" or not figures.startswith("0"))
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


def _digits(found: re.Match[str]) -> str:
    """An Ethiopic numeral in digits: ፲፱፻፺፱ as 1999."""
    numeral = found[0]
    return str(_value(numeral)) if len(numeral) <= _MOST_SIGNS else " ".join(str(_value(sign)) for sign in numeral)


def _value(numeral: str) -> int:
    """Return the value: the signs for 100 and 10,000 multiply what is before them, or count once alone.

    Source: W3C, CSS Counter Styles Level 3, 7.2.1 "ethiopic-numeric".
    """
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


def _split(number: int, scales: Sequence[tuple[int, str]]) -> tuple[list[tuple[int, str]], int]:
    """Return how often each scale is in a number, the largest first, and the rest."""
    counts = []
    for value, name in scales:
        count, number = divmod(number, value)
        if count:
            counts.append((count, name))
    return counts, number


def _ordinal(said: str, irregular: dict[str, str], ending: str) -> str:
    """A cardinal with another last word."""
    before, space, last = said.rpartition(" ")
    return before + space + irregular.get(last, last.removesuffix("a") + ending)


def _english(number: int, to: str = "cardinal") -> str:
    return str(num2words(number, lang="en", to=to)).replace(",", "")


# Sources: University of Wisconsin, "Resources for Self-Instructional Learners of Less Commonly Taught Languages",
# chapter "Numbers" (composition); num2words 0.5.14, lang_AM.py (spelling of the words and the ordinals; its composition
# is not used, it fails from 1,100 on).
_AM_ONES = ("", "አንድ", "ሁለት", "ሦስት", "አራት", "አምስት", "ስድስት", "ሰባት", "ስምንት", "ዘጠኝ")
_AM_TENS = ("", "አሥራ", "ሃያ", "ሠላሳ", "አርባ", "ሃምሳ", "ስልሳ", "ሰባ", "ሰማንያ", "ዘጠና")
_AM_TEN = "አሥር"
_AM_SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (1000, "ሺህ"), (100, "መቶ"))
_AM_FIRST_TO_TENTH = ("አንደኛ", "ሁለተኛ", "ሦስተኛ", "አራተኛ", "አምስተኛ", "ስድስተኛ", "ሰባተኛ", "ስምንተኛ", "ዘጠነኛ", "አሥረኛ")
_AM_ORDINALS = dict(zip((*_AM_ONES[1:], _AM_TEN), _AM_FIRST_TO_TENTH, strict=True))


def _amharic(number: int) -> str:
    counts, rest = _split(number, _AM_SCALES)
    tens, ones = divmod(rest, 10)
    words = [f"{_amharic(count)} {name}" for count, name in counts]
    words += [_AM_TEN] if rest == 10 else filter(None, [_AM_TENS[tens], _AM_ONES[ones]])
    return " ".join(words) or "ዜሮ"


# What is counted comes before its number: dhibba lama, 200.
# Sources: Wikibooks, "Afaan Oromo", chapter 1 (composition, fi, ordinals); languagesandnumbers.com, "Counting in Oromo"
# (tens before units end in -ii); the package ethio_numbers (names of the larger scales).
_OM_ONES = ("", "tokko", "lama", "sadii", "afur", "shan", "ja'a", "torba", "saddeet", "sagal")
_OM_TENS = (
    *("", "kudhan", "digdama", "soddoma", "afurtama", "shantama", "jaatama"),
    *("torbaatama", "saddeettama", "sagaltama"),
)
_OM_SCALES = ((10**9, "biliyoona"), (10**6, "miliyoona"), (1000, "kuma"), (100, "dhibba"))
_OM_ORDINALS = {
    "tokko": "tokkoffaa",
    "lama": "lammaffaa",
    "sadii": "sadaffaa",
    "afur": "afraffaa",
    "sagal": "saglaffaa",
    "kudhan": "kurnaffaa",
}


def _oromo(number: int) -> str:
    """What is below a hundred is joined to what is above by fi."""
    counts, rest = _split(number, _OM_SCALES)
    tens, ones = divmod(rest, 10)
    below = _OM_TENS[tens] or _OM_ONES[ones]
    if tens and ones:
        below = f"{'kudha' if tens == 1 else _OM_TENS[tens].removesuffix('a') + 'ii'} {_OM_ONES[ones]}"
    above = " ".join(f"{name} {_oromo(count)}" for count, name in counts)
    return " fi ".join(filter(None, [above, below])) or "zeeroo"


# Units come before tens, as in the north: kow iyo labaatan, 21.
# Sources: M. D. Abdullahi and others at hooyo.web, "Somali course", chapter 31 (composition up to thousands); Omniglot,
# "Numbers in Somali" (words, ordinals); learnsomali.com, "Somali numbers and counting" (zero, larger scales).
_SO_ONES = ("", "kow", "laba", "saddex", "afar", "shan", "lix", "toddoba", "siddeed", "sagaal")
_SO_TENS = ("", "toban", "labaatan", "soddon", "afartan", "konton", "lixdan", "toddobaatan", "siddeetan", "sagaashan")
_SO_SCALES = ((10**9, "bilyan"), (10**6, "milyan"), (1000, "kun"), (100, "boqol"))
# A hundred or thousand alone has no number before it; "one" before a noun is hal, and a million is one.
_SO_ONE_OF = {"boqol": "boqol", "kun": "kun", "milyan": "hal milyan", "bilyan": "hal bilyan"}
_SO_ORDINALS = {"afar": "afraad", "toban": "tobnaad", "boqol": "boqlaad"}


def _somali(number: int) -> str:
    """Everything is joined by iyo."""
    counts, rest = _split(number, _SO_SCALES)
    words = [_SO_ONE_OF[name] if count == 1 else f"{_somali(count)} {name}" for count, name in counts]
    return " iyo ".join(filter(None, [*words, _SO_ONES[rest % 10], _SO_TENS[rest // 10]])) or "eber"


# Source: F. Gaim and I. Tesfamariam, "Tigrinya Number Verbalization: Rules, Algorithm, and Implementation",
# arXiv:2601.03403 (January 2026): the words, what -ን joins, and the ordinals, in the masculine.
_TI_ONES = ("", "ሓደ", "ክልተ", "ሰለስተ", "ኣርባዕተ", "ሓሙሽተ", "ሽድሽተ", "ሸውዓተ", "ሸሞንተ", "ትሽዓተ", "ዓሰርተ")
_TI_TENS = ("", "", "ዕስራ", "ሰላሳ", "ኣርብዓ", "ሓምሳ", "ሱሳ", "ሰብዓ", "ሰማንያ", "ቴስዓ")
_TI_HUNDRED_ALONE, _TI_HUNDRED_JOINED = "ሚእቲ", "ሚእት"
_TI_SCALES = ((10**9, "ቢልዮን"), (10**6, "ሚልዮን"), (1000, "ሽሕ"))
_TI_ORDINALS = ("", "ቀዳማይ", "ካልኣይ", "ሳልሳይ", "ራብዓይ", "ሓሙሻይ", "ሻድሻይ", "ሻውዓይ", "ሻምናይ", "ታሽዓይ", "ዓስራይ")


def _tigrinya_parts(number: int) -> list[str]:
    """The parts of a number below a thousand that may take -ን."""
    hundreds, rest = divmod(number, 100)
    parts = [f"{_TI_ONES[hundreds]} {_TI_HUNDRED_JOINED}"] if hundreds else []
    if rest > 19:
        return [*parts, *filter(None, [_TI_TENS[rest // 10], _TI_ONES[rest % 10]])]
    if rest > 10:
        return [*parts, f"{_TI_ONES[10]} {_TI_ONES[rest % 10]}"]
    return [*parts, _TI_ONES[rest]] if rest else parts


def _tigrinya(number: int) -> str:
    counts, rest = _split(number, _TI_SCALES)
    parts: list[str] = []
    for count, name in counts:
        multiplier = _tigrinya_parts(count)
        # One part and its scale are one part together; after several parts, the scale is a part of its own.
        parts += [f"{multiplier[0]} {name}"] if len(multiplier) == 1 else [*multiplier, name]
    parts += _tigrinya_parts(rest)
    if len(parts) <= 1:
        return "".join(parts).replace(_TI_HUNDRED_JOINED, _TI_HUNDRED_ALONE) or "ዜሮ"
    last = [parts.pop()] if len(counts) == 1 and not rest else []
    return " ".join([*(f"{part}ን" for part in parts), *last])


def _tigrinya_ordinal(number: int) -> str:
    return _TI_ORDINALS[number] if number < len(_TI_ORDINALS) else f"መበል {_tigrinya(number)}"


LANGUAGES = {
    "am": Numbers(
        cardinal=_amharic,
        ordinal=lambda number: _ordinal(_amharic(number), _AM_ORDINALS, "ኛ"),
        ordinal_endings=("ኛው", "ኛ"),
        minus="አሉታዊ",
        point="ነጥብ",
        percent="{} በመቶ",
    ),
    "en": Numbers(
        cardinal=_english,
        ordinal=partial(_english, to="ordinal"),
        ordinal_endings=("st", "nd", "rd", "th"),
        minus="minus",
        point="point",
        percent="{} percent",
    ),
    "om": Numbers(
        cardinal=_oromo,
        ordinal=lambda number: _ordinal(_oromo(number), _OM_ORDINALS, "affaa"),
        ordinal_endings=("affaa", "ffaa"),
        minus="negaatiivii",
        point="tuqaa",
        percent="dhibbeentaa {}",
    ),
    "so": Numbers(
        cardinal=_somali,
        ordinal=lambda number: _ordinal(_somali(number), _SO_ORDINALS, "aad"),
        ordinal_endings=("aad",),
        minus="taban",
        point="dhibic",
        percent="boqolkiiba {}",
    ),
    "ti": Numbers(
        cardinal=_tigrinya,
        ordinal=_tigrinya_ordinal,
        ordinal_endings=("ይ",),
        minus="ኣሉታ",
        point="ነጥቢ",
        percent="{} ሚእታዊት",
    ),
}

"""How large a regular expression of a JSON schema becomes once its repeats are written out, as the compiler does."""

from __future__ import annotations

import re
from re import _constants as kinds  # type: ignore[attr-defined]  # Python's own parser; not public
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_MAX_CHARACTERS = 256
_ENDLESS = 4  # what `+` and `*` count for, within another repeat or alone
_BRACES = re.compile(r"(?<!\\)\{(?!\d{1,6}(,\d{0,6})?\})")


class SchemaTooComplexError(ValueError):
    """The sentence follows the name of the field."""

    code = "schema_too_complex"


def pattern_size(pattern: str) -> int:
    """Return the number of symbols that `pattern` stands for.

    Measured with xgrammar on a CPU: `(a|b|[a-z]+){1,1000}` twenty times blocks everybody for 8 s. Lookaround is not
    followed but silently left out there, so it is refused. Raises `SchemaTooComplexError`.
    """
    if len(pattern) > _MAX_CHARACTERS:
        raise SchemaTooComplexError(f"must have patterns of at most {_MAX_CHARACTERS} characters")
    if "(?" in pattern.replace("(?:", "") or _BRACES.search(pattern):
        raise SchemaTooComplexError("must have patterns without lookaround, names or flags (`(?:...)` is fine)")
    try:
        return _size(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise SchemaTooComplexError("must have patterns that are plain regular expressions") from error


def _size(parsed: Any) -> int:
    return sum(_of_one(kind, value) for kind, value in parsed)


def _of_one(kind: Any, value: Any) -> int:
    if kind in {kinds.MAX_REPEAT, kinds.MIN_REPEAT}:
        least, most, repeated = value
        times = max(least, 1) * _ENDLESS if most is kinds.MAXREPEAT else max(most, 1)
        return int(times) * _size(repeated)
    if kind is kinds.BRANCH:
        return sum(_size(branch) for branch in value[1])
    if kind is kinds.SUBPATTERN:
        return _size(value[3])
    if kind in {kinds.LITERAL, kinds.NOT_LITERAL, kinds.ANY, kinds.IN, kinds.AT, kinds.CATEGORY}:
        return 1
    raise SchemaTooComplexError("must have patterns without references to their own groups")

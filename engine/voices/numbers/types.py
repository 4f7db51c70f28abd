"""How one language says its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Above it the scale words of these languages are too little agreed upon: the digits are read instead.
LARGEST = 999_999_999_999


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """`cardinal` says 0 to `LARGEST`, `ordinal` 1 to `LARGEST`, which is written with one of `ordinal_endings`.

    `percent` holds the place of the number as `{}`.
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

"""What a benchmark's aims came to: a measured value, the bound it should keep, and whether it does."""

from __future__ import annotations

from typing import Literal

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """`what` was measured with its unit; it should be at most or at least `bound`.

    Without a bound it is only worth knowing; without a value it could not be measured.
    """

    what: str
    value: float | None
    should_be: Literal["at most", "at least"]
    bound: float | None
    met: bool | None

    @classmethod
    def at_most(cls, what: str, value: float | None, bound: float | None) -> Verdict:
        """Judge what should be small."""
        met = None if value is None or bound is None else value <= bound
        return cls(what, value, "at most", bound, met)

    @classmethod
    def at_least(cls, what: str, value: float | None, bound: float | None) -> Verdict:
        """Judge what should be large."""
        met = None if value is None or bound is None else value >= bound
        return cls(what, value, "at least", bound, met)

    def sentence(self) -> str:
        """Return it for people."""
        if self.bound is None and self.value is not None:
            return f"to know: {self.what} is {_shown(self.value)}"
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"{word}: {self.what} is {_shown(self.value)}, aim {self.should_be} {_shown(self.bound)}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"

"""Which images take their next step together. A pure question; denoising them is engine/backends'.

Asked before every step, so images join and leave between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True, slots=True)
class Candidate:
    """One image with steps to go.

    Only those with equal `agrees` can share a step. `share` is the part of the memory's room that it takes, above 0
    and at most 1.
    """

    job: int
    agrees: Hashable
    share: Fraction


def share_of(max_batch: int) -> Fraction:
    """Return what one of `max_batch` images that fit together takes of the room."""
    return Fraction(1, max_batch)


def next_together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return who takes the next step; `candidates` are in the order of who has waited longest since the last one.

    The first always does, with everybody behind it who agrees and still finds room. Whoever asks again with those
    moved to the end gives each group its turn, so that a newcomer of an odd size waits for a step and not for an image.
    """
    together: list[Candidate] = []
    room = Fraction(1)
    for candidate in candidates:
        if (not together or candidate.agrees == together[0].agrees) and candidate.share <= room:
            together.append(candidate)
            room -= candidate.share
    return together

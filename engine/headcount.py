"""How many of something each owner has here at this moment, and who has a fair share of it already."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Headcount:
    """Forgets owners who have nothing here. None is an owner like any other: nobody that is known."""

    def __init__(self) -> None:
        self._of: dict[str | None, int] = {}
        self.total = 0

    @property
    def owners(self) -> int:
        """How many have something here."""
        return len(self._of)

    def of(self, owner: str | None) -> int:
        """Return how many are theirs."""
        return self._of.get(owner, 0)

    def has_share(self, owner: str | None, most: int) -> bool:
        """Whether `most` are here, and of these as many are the owner's as if all had equally many."""
        return self.total >= most and self.of(owner) * self.owners >= most

    @contextmanager
    def one_more(self, owner: str | None) -> Iterator[None]:
        """Count one more while the block runs."""
        self.total += 1
        self._of[owner] = self.of(owner) + 1
        try:
            yield
        finally:
            self.total -= 1
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]

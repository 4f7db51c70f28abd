"""How many of something each owner has here at this moment, and who has a fair share of it already."""

from __future__ import annotations


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

    def add(self, owner: str | None) -> None:
        """Count one more, until `remove`."""
        self.total += 1
        self._of[owner] = self.of(owner) + 1

    def remove(self, owner: str | None) -> None:
        """Count one less."""
        self.total -= 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]

    def one_more(self, owner: str | None) -> OneMore:
        """Count one more while the block runs."""
        return OneMore(self, owner)


class OneMore:
    """`with`. No generator, like all that each request passes through: one of those takes twice as long, or thrice."""

    __slots__ = ("_headcount", "_owner")

    def __init__(self, headcount: Headcount, owner: str | None) -> None:
        self._headcount = headcount
        self._owner = owner

    def __enter__(self) -> None:
        """Count it."""
        self._headcount.add(self._owner)

    def __exit__(self, *_: object) -> None:
        """It is over."""
        self._headcount.remove(self._owner)

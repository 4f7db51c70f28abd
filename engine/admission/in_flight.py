"""How many requests each owner has in flight, and which owner has a fair share already."""

from __future__ import annotations


class InFlight:
    """Forgets owners with nothing in flight. None is an owner like any other: one that is not known."""

    def __init__(self) -> None:
        self._of: dict[str | None, int] = {}
        self.total = 0

    @property
    def owners(self) -> int:
        """How many owners have something in flight."""
        return len(self._of)

    def of(self, owner: str | None) -> int:
        """Return how many are theirs."""
        return self._of.get(owner, 0)

    def has_share(self, owner: str | None, most: int) -> bool:
        """Whether `most` are in flight, and of these as many are the owner's as if all had equally many."""
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

    __slots__ = ("_in_flight", "_owner")

    def __init__(self, in_flight: InFlight, owner: str | None) -> None:
        self._in_flight = in_flight
        self._owner = owner

    def __enter__(self) -> None:
        """Count it."""
        self._in_flight.add(self._owner)

    def __exit__(self, *_: object) -> None:
        """It is over."""
        self._in_flight.remove(self._owner)

"""What loaded models hold of each device in truth. A plan that changed takes effect at a model's next load, not before.

What is planned is placement.py's, who takes turns eviction.py's; this keeps both honest. Bytes by device: a GPU's
index, None for RAM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Bytes = Mapping[int | None, int]

_NOTHING: Bytes = MappingProxyType({})
# Less than this, and less than a sixteenth, is not worth telling anybody.
_WORTH_SAYING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Shares:
    """What is planned: all there is of each device, what each model takes, and who takes turns with others."""

    budgets: Bytes = field(default_factory=dict)
    needs: Mapping[str, Bytes] = field(default_factory=dict)
    turns: frozenset[str] = frozenset()


class Holdings:
    """One per engine, made in its event loop. A device without a budget is not looked after."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._held: dict[str, Bytes] = {}
        self._kept: dict[str, Bytes] = {}  # what each takes again that is restarted, or wakes up
        self._asleep: set[str] = set()
        self._going: set[str] = set()
        self._left = asyncio.Event()

    def plan(self, shares: Shares) -> None:
        """From now on this is planned."""
        self._shares = shares
        self._tell()

    def forget(self, names: Iterable[str]) -> None:
        """These take what is planned when they are loaded again, and in no case what they had."""
        for name in names:
            self._kept.pop(name, None)

    def going(self, names: Iterable[str]) -> None:
        """These end as soon as their last answer has."""
        self._going.update(name for name in names if name in self._held)
        self._tell()

    def took(self, name: str, took: Bytes) -> None:
        """Say that a model is being loaded with so much."""
        self._held[name] = self._kept[name] = took
        self._asleep.discard(name)

    def left(self, name: str, *, asleep: bool = False) -> None:
        """Say that it holds nothing any more; asleep, it comes back with what it had."""
        self._held.pop(name, None)
        self._going.discard(name)
        if asleep:
            self._asleep.add(name)
        else:
            self._asleep.discard(name)
            self._kept.pop(name, None)
        self._tell()

    def most(self, name: str) -> Bytes:
        """Return what it may take until models.yaml is read again: what it has or had, or what is planned."""
        kept, need = self._kept.get(name, _NOTHING), self._shares.needs.get(name, _NOTHING)
        return {device: max(kept.get(device, 0), need.get(device, 0)) for device in {**kept, **need}}

    def later(self) -> dict[str, Bytes]:
        """Return the loaded models that hold something else than is planned, and what is planned."""
        needs = self._shares.needs
        return {name: needs[name] for name in self._held if name in needs and self._differs(name)}

    def too_much(self) -> set[str]:
        """Return the models that have to be loaded anew, because others cannot have what is planned for them."""
        found: set[str] = set()
        for device, budget in self._shares.budgets.items():
            while self._planned_on(device, renewed=found) > budget:
                more = {name: self._surplus(name, device) for name in (self._held.keys() | self._asleep) - found}
                name = max(sorted(more), key=more.__getitem__, default=None)
                if name is None or more[name] <= 0:
                    break
                found.add(name)
        return found

    def takes_what_is_planned(self, name: str) -> bool:
        """Whether it is loaded with what is planned now; else with what it had, as others still have theirs."""
        if name not in self._kept or name in self._asleep:
            return name not in self._kept
        budgets = self._shares.budgets.items()
        return all(self._planned_on(device, renewed={name}) <= budget for device, budget in budgets)

    async def room_for(self, name: str) -> None:
        """Wait until those have left that must, for what it is to be loaded with; from then on it holds that."""
        while True:
            new = self._shares.needs.get(name, _NOTHING) if self.takes_what_is_planned(name) else self._kept[name]
            if not self._must_wait(name, new):
                break
            left = self._left
            await left.wait()
        self._held[name] = new

    def _must_wait(self, name: str, new: Bytes) -> bool:
        leave = self._going if name in self._shares.turns else self._going | self._shares.turns
        for device, budget in self._shares.budgets.items():
            others = {other: held.get(device, 0) for other, held in self._held.items() if other != name}
            lacks = bool(new.get(device)) and sum(others.values()) + new.get(device, 0) > budget
            if lacks and any(others[other] for other in others.keys() & leave):
                return True
        return False

    def _planned_on(self, device: int | None, renewed: Collection[str]) -> int:
        """Return what all take that there are to be, if these take what is planned and the others what they have."""
        sizes = {
            name: (need if name in renewed else self._kept.get(name, need)).get(device, 0)
            for name, need in self._shares.needs.items()
        }
        turns = [sizes.pop(name) for name in self._shares.turns & sizes.keys()]
        return sum(sizes.values()) + max(turns, default=0)

    def _surplus(self, name: str, device: int | None) -> int:
        if name not in self._shares.needs or name not in self._kept:
            return 0
        return self._kept[name].get(device, 0) - self._shares.needs[name].get(device, 0)

    def _differs(self, name: str) -> bool:
        held, need = self._held[name], self._shares.needs[name]
        if name in self._going:
            return False
        return any(
            abs(held.get(device, 0) - need.get(device, 0)) > max(_WORTH_SAYING_BYTES, need.get(device, 0) // 16)
            for device in {**held, **need}
        )

    def _tell(self) -> None:
        self._left.set()
        self._left = asyncio.Event()

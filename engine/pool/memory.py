"""The ledger of memory: what is planned for each model, what each really has, and which are on their way in or out.

A plan that changed takes effect at a model's next load, not before: the ledger keeps both in truth. The plan itself is
made in placement/, and leases.py decides which models come and go. Bytes by device: a GPU's index, None for RAM.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Device = int | None
Bytes = Mapping[Device, int]
State = Literal["out", "coming", "in", "leaving"]

# Less than this, and less than a sixteenth, is not worth a message.
_WORTH_SAYING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """What is planned for one model.

    With `swaps` it shares its bytes with others that swap, and is loaded when it is asked for. A `pinned` one is never
    evicted. Without a request for `unload_after_seconds` it is evicted even if nothing needs its memory (None: not).
    """

    bytes_on: Bytes
    swaps: bool = False
    pinned: bool = False
    unload_after_seconds: float | None = None

    @property
    def evictable(self) -> bool:
        """Whether it comes and goes, as leases.py decides."""
        return bool(self.bytes_on) and (self.swaps or self.unload_after_seconds is not None)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What models may take of each device in all, and each one's share. A device without a budget is not limited."""

    budgets: Bytes = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    state: State = "out"
    has: Bytes | None = None  # None: nothing
    again: Bytes | None = None  # what it takes again when it is restarted or wakes up
    asleep: bool = False
    ending: bool = False  # it ends with its last answer, by a reload


class Changes:
    """Wakes whatever waits for a condition, to look again. Belongs to one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; it is looked at now and after each change."""
        while not condition():
            await self.wait()


class Ledger:
    """One per engine; all methods belong to its event loop. `changes` tells of every entry that changed."""

    def __init__(self, plan: MemoryPlan | None = None) -> None:
        self._plan = plan or MemoryPlan()
        self._entries: defaultdict[str, _Entry] = defaultdict(_Entry)
        self.changes = Changes()

    def plan(self, plan: MemoryPlan) -> None:
        self._plan = plan
        for name, entry in self._entries.items():
            if entry.state == "leaving" and not self.is_evictable(name):
                entry.state = "in"  # it has all the memory that it needs
        self.changes.notify()

    @property
    def evictable(self) -> dict[str, Share]:
        """Models that come and go, as leases.py decides; all others stay."""
        return {name: share for name, share in self._plan.shares.items() if share.evictable}

    def is_evictable(self, name: str) -> bool:
        return self._share(name).evictable

    def evictable_budgets(self) -> dict[Device, int]:
        """Return what evictable models may take together: what others leave, and at least what the largest takes."""
        budgets = dict(self._plan.budgets)
        for name, share in self._plan.shares.items():
            if not share.evictable:
                for device, size in self.most(name).items():
                    budgets[device] = budgets.get(device, 0) - size
        for name in self.evictable:
            for device, size in self.most(name).items():
                budgets[device] = max(budgets.get(device, 0), size)
        return budgets

    def state(self, name: str) -> State:
        """Return where a model is: out, granted memory and coming, in, or told to leave."""
        return self._entries[name].state

    def move(self, name: str, state: State) -> None:
        """Coming: it may be loaded or woken; its memory is its own until `release`. Leaving: when its leases end."""
        self._entries[name].state = state
        self.changes.notify()

    def release(self, name: str, *, asleep: bool = False) -> None:
        """It has nothing any more; asleep, it comes back with what it had."""
        entry = self._entries[name]
        entry.has, entry.ending, entry.asleep = None, False, asleep
        if not asleep:
            entry.again = None
        self.move(name, "out")

    def take(self, name: str, took: Bytes) -> None:
        """It is being loaded with so much."""
        self._entries[name] = replace(self._entries[name], has=took, again=took, asleep=False)

    def forget(self, names: Iterable[str]) -> None:
        """These take what is planned when they are loaded again, and in no case what they had."""
        for name in names:
            self._entries[name].again = None

    def end_soon(self, names: Iterable[str]) -> None:
        """These end with their last answer, to be loaded anew or not at all."""
        for name in names:
            entry = self._entries[name]
            entry.ending = entry.ending or entry.has is not None
        self.changes.notify()

    async def reserve(self, name: str) -> None:
        """Wait until those have left that must, for what it is to be loaded with; from then on it has that."""
        while self._must_wait(name, self._next_load(name)):
            await self.changes.wait()
        self._entries[name].has = self._next_load(name)

    def takes_what_is_planned(self, name: str) -> bool:
        """Whether it is loaded with what is planned now; else with what it had, as others still have theirs."""
        entry = self._entries[name]
        if entry.again is None or entry.asleep:
            return entry.again is None
        budgets = self._plan.budgets.items()
        return all(self._planned_on(device, renewed={name}) <= budget for device, budget in budgets)

    def most(self, name: str) -> Bytes:
        """Return what it may take until models.yaml is read again: what it has or had, or what is planned."""
        again, need = self._entries[name].again or {}, self._share(name).bytes_on
        return {device: max(again.get(device, 0), need.get(device, 0)) for device in {**again, **need}}

    def later(self) -> dict[str, Bytes]:
        """Return the loaded models that have something else than is planned, and what is planned."""
        return {name: share.bytes_on for name, share in self._plan.shares.items() if self._differs(name)}

    def too_much(self) -> set[str]:
        """Return the models that have to be loaded anew, because others cannot have what is planned for them."""
        there = {name for name, entry in self._entries.items() if entry.has is not None or entry.asleep}
        found: set[str] = set()
        for device, budget in self._plan.budgets.items():
            while self._planned_on(device, renewed=found) > budget:
                more = {name: self._surplus(name, device) for name in sorted(there - found)}
                name = max(more, key=more.__getitem__, default=None)
                if name is None or more[name] <= 0:
                    break
                found.add(name)
        return found

    def _share(self, name: str) -> Share:
        return self._plan.shares.get(name) or Share({})

    def _next_load(self, name: str) -> Bytes:
        again = None if self.takes_what_is_planned(name) else self._entries[name].again
        return self._share(name).bytes_on if again is None else again

    def _must_wait(self, name: str, new: Bytes) -> bool:
        """Whether others have memory that it needs, and are going to leave. Where none is, waiting would be in vain."""
        others = {other: entry.has for other, entry in self._entries.items() if other != name and entry.has}
        for device, budget in self._plan.budgets.items():
            sizes = {other: has.get(device, 0) for other, has in others.items()}
            lacks = bool(new.get(device)) and sum(sizes.values()) + new.get(device, 0) > budget
            if lacks and any(size and self._leaves(other, name) for other, size in sizes.items()):
                return True
        return False

    def _leaves(self, name: str, other: str) -> bool:
        """Whether a model leaves for another one: by a reload, or by eviction, which is granted the other's share."""
        return self._entries[name].ending or (self._share(name).swaps and not self._share(other).swaps)

    def _planned_on(self, device: Device, renewed: Collection[str]) -> int:
        """Return what all take that there are to be, if these take what is planned and the others what they have."""
        stay, largest_swap = 0, 0
        for name, share in self._plan.shares.items():
            again = self._entries[name].again
            size = (share.bytes_on if name in renewed or again is None else again).get(device, 0)
            if share.swaps:
                largest_swap = max(largest_swap, size)
            else:
                stay += size
        return stay + largest_swap

    def _surplus(self, name: str, device: Device) -> int:
        again = self._entries[name].again
        if again is None or name not in self._plan.shares:
            return 0
        return again.get(device, 0) - self._share(name).bytes_on.get(device, 0)

    def _differs(self, name: str) -> bool:
        entry, need = self._entries[name], self._share(name).bytes_on
        if entry.has is None or entry.ending:
            return False
        has = entry.has
        return any(
            abs(has.get(device, 0) - need.get(device, 0)) > max(_WORTH_SAYING_BYTES, need.get(device, 0) // 16)
            for device in {**has, **need}
        )

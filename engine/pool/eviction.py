"""Who is loaded where not all models fit into memory together: a pure schedule, told what happens and asked what to do.

It knows neither processes nor requests, and has no clock of its own. Who loads and ends models is the pool (pool.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# One exchange on a device in this time: two users who want different models must not make it do nothing but load.
SWAP_EVERY_SECONDS = 10.0
# A model that others use all the time gives way after a request for another one has waited this long.
LONGEST_WAIT_SECONDS = 30.0

Presence = Literal["out", "coming", "in", "leaving"]
_Device = int | None  # a GPU's index, None for RAM


@dataclass(frozen=True, slots=True)
class Room:
    """What a model takes of each device while it is loaded, in bytes."""

    bytes_on: Mapping[_Device, int]
    pinned: bool = False
    unload_after_seconds: float | None = None
    """Without a request for this long it leaves, even if nobody needs its room. None: it stays."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, and after how many seconds to ask again though nothing has happened."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    again_seconds: float | None = None


@dataclass(slots=True)
class _Model:
    name: str
    room: Room
    presence: Presence = "out"
    users: int = 0
    asked_at: float | None = None  # the oldest request that waits for it
    in_since: float = 0.0
    used_at: float = 0.0


@dataclass(slots=True)
class Residency:
    """The models that take turns. `budgets` is what they may take of each device together, in bytes.

    No order of events lets the models that come, stay and leave take more than a budget. One that is in use may be told
    to leave, but is out only when its last request has ended. Who waits longest is served first.
    """

    budgets: Mapping[_Device, int]
    rooms: Mapping[str, Room]
    swaps: int = 0
    _models: dict[str, _Model] = field(init=False)
    _swapped_at: dict[_Device, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `ValueError` when one alone needs more than its device has: no plan does that."""
        self._models = {name: _Model(name, room) for name, room in self.rooms.items()}
        for model in self._models.values():
            for device, needed in model.room.bytes_on.items():
                if needed > self.budgets.get(device, 0):
                    raise ValueError(f"{model.name} alone needs more than its device has")

    def fill(self) -> Decision:
        """Begin: as many as there is room for, in the order given, pinned ones first."""
        ordered = sorted(self._models.values(), key=lambda model: not model.room.pinned)
        return Decision(load=tuple(model.name for model in ordered if self._admit(model)))

    def follow(self, old: Residency, loaded: Collection[str], now: float) -> None:
        """Go on where another one was left: with other models or memory, and these models loaded or being so."""
        self.swaps, self._swapped_at = old.swaps, old._swapped_at
        for name, model in self._models.items():
            if name in old._models:  # wherever it is: one that wakes up or is being ended has memory, too
                self._models[name] = replace(old._models[name], room=model.room)
            elif name in loaded:
                self.is_in(name, now)

    def asked(self, name: str, now: float) -> None:
        """Say that a request waits for a model that is not loaded."""
        model = self._models[name]
        model.asked_at = now if model.asked_at is None else model.asked_at

    def nobody_asks(self, name: str) -> None:
        """Say that nobody waits for it any more."""
        self._models[name].asked_at = None

    def began(self, name: str) -> None:
        """Say that a request uses it."""
        self._models[name].users += 1

    def ended(self, name: str, now: float) -> None:
        """Say that one of them has ended."""
        model = self._models[name]
        model.users = max(0, model.users - 1)  # it may have begun before models.yaml was read again
        model.used_at = now

    def is_in(self, name: str, now: float) -> None:
        """Say that it is loaded."""
        model = self._models[name]
        model.presence, model.asked_at = "in", None
        model.in_since = model.used_at = now

    def is_out(self, name: str) -> None:
        """Say that it is not loaded (any more), and its memory free."""
        self._models[name].presence = "out"

    def gives_way(self, name: str) -> bool:
        """Whether it is to leave: new requests wait until it is back."""
        return self._models[name].presence == "leaving"

    def presence(self, name: str) -> Presence:
        """Return where it is."""
        return self._models[name].presence

    def used_bytes(self, device: _Device) -> int:
        """Return what those take that are not out."""
        return sum(_on(model, device) for model in self._models.values() if model.presence != "out")

    def decide(self, now: float) -> Decision:
        """Say what to load and unload now."""
        load: list[str] = []
        unload = [model.name for model in self._models.values() if self._idle_in(model, now) == 0]
        unload += [name for name in self._beyond_budget() if name not in unload]
        for name in unload:
            self._models[name].presence = "leaving"
        idle_in = [self._idle_in(model, now) for model in self._models.values()]
        again = [seconds for seconds in idle_in if seconds is not None]
        kept: set[_Device] = set()  # what is made free there is for who waits longest
        for model in self._waiting():
            if kept.isdisjoint(model.room.bytes_on) and self._admit(model):
                load.append(model.name)
            elif kept.isdisjoint(model.room.bytes_on):
                victims, wait = self._victims(model, now)
                unload += [victim.name for victim in victims]
                again += [] if wait is None else [wait]
            kept.update(model.room.bytes_on)
        return Decision(tuple(load), tuple(unload), min(again, default=None))

    def _beyond_budget(self) -> list[str]:
        """Return who has to leave because models.yaml has given their room to others: who was used longest ago."""
        found: list[str] = []
        there = [one for one in self._models.values() if one.presence == "in" and not one.room.pinned]
        for one in sorted(there, key=lambda one: (one.users > 0, one.used_at)):
            staying = {
                device: sum(_on(other, device) for other in self._models.values() if other.presence in {"in", "coming"})
                for device in one.room.bytes_on
            }
            if any(size > self.budgets.get(device, 0) for device, size in staying.items()):
                one.presence = "leaving"
                found.append(one.name)
        return found

    def _waiting(self) -> list[_Model]:
        asked = [(model.asked_at, model.name) for model in self._models.values() if model.asked_at is not None]
        return [self._models[name] for _, name in sorted(asked) if self._models[name].presence == "out"]

    def _admit(self, model: _Model) -> bool:
        if any(self._free(device) < needed for device, needed in model.room.bytes_on.items()):
            return False
        model.presence = "coming"
        return True

    def _free(self, device: _Device) -> int:
        return self.budgets.get(device, 0) - self.used_bytes(device)

    def _victims(self, model: _Model, now: float) -> tuple[list[_Model], float | None]:
        """Tell others to make room for it. Return them; nobody when that must wait, and for how many seconds."""
        lacks = {device: needed - self._free(device) for device, needed in model.room.bytes_on.items()}
        for leaving in self._models.values():
            if leaving.presence == "leaving":
                lacks = {device: lack - _on(leaving, device) for device, lack in lacks.items()}
        lacks = {device: lack for device, lack in lacks.items() if lack > 0}
        if not lacks:
            return [], None  # room is being made
        pause = max(self._swapped_at.get(device, -SWAP_EVERY_SECONDS) for device in lacks) + SWAP_EVERY_SECONDS - now
        if pause > 0:
            return [], pause
        there = [one for one in self._models.values() if one.presence == "in" and not one.room.pinned]
        ripe_in = {one.name: self._ripe_in(one, model, now) for one in there}
        ripe = [one for one in there if ripe_in[one.name] <= 0]
        chosen = _fewest(sorted(ripe, key=lambda one: (one.users > 0, one.used_at)), lacks)
        if chosen:
            self.swaps += 1
            self._swapped_at.update(dict.fromkeys(model.room.bytes_on, now))
            for victim in chosen:
                victim.presence = "leaving"
            return chosen, None
        return [], min((wait for wait in ripe_in.values() if wait > 0), default=None)

    def _ripe_in(self, one: _Model, model: _Model, now: float) -> float:
        """Return after how many seconds it may be told to leave; 0 or less: now."""
        settled = one.in_since + SWAP_EVERY_SECONDS - now
        if one.users == 0:
            return settled
        asked_at = now if model.asked_at is None else model.asked_at
        return max(settled, asked_at + LONGEST_WAIT_SECONDS - now)

    def _idle_in(self, model: _Model, now: float) -> float | None:
        after = model.room.unload_after_seconds
        if after is None or model.presence != "in" or model.users or model.room.pinned:
            return None
        return max(0.0, model.used_at + after - now)


def _on(model: _Model, device: _Device) -> int:
    return model.room.bytes_on.get(device, 0)


def _fewest(ordered: Iterable[_Model], lacks: Mapping[_Device, int]) -> list[_Model]:
    """Return the first of them whose leaving makes enough room, less those that need not go; none if it cannot be."""
    chosen: list[_Model] = []
    for model in ordered:
        if _made(chosen, lacks):
            break
        if any(_on(model, device) for device in lacks):
            chosen.append(model)
    if not _made(chosen, lacks):
        return []
    for model in list(chosen):
        others = [one for one in chosen if one is not model]
        if _made(others, lacks):
            chosen = others
    return chosen


def _made(chosen: Iterable[_Model], lacks: Mapping[_Device, int]) -> bool:
    freed = list(chosen)
    return all(sum(_on(model, device) for model in freed) >= lack for device, lack in lacks.items())

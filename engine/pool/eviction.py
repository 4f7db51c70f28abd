"""Decides what is loaded and evicted where not all models fit into memory together.

Pure: it knows neither processes nor requests, has no clock, and must not log. What it decides is noted in the ledger
(memory.py), and the pool carries it out. Bytes by device: a GPU's index, None for RAM.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Device = int | None
Bytes = Mapping[Device, int]
State = Literal["out", "coming", "in", "leaving"]

# From one swap on a device to the next, and the least that a model stays: else two users would make it only load.
SWAP_EVERY_SECONDS = 10.0
# A model that is always in use is evicted after a request for another one has waited this long.
LONGEST_WAIT_SECONDS = 30.0


@dataclass(slots=True)
class Model:
    """A model that comes and goes, as it is now. `asked_at`: since when a request waits for it. Times in seconds."""

    name: str
    bytes_on: Bytes = field(default_factory=dict)
    state: State = "out"
    leases: int = 0
    asked_at: float | None = None
    loaded_at: float = 0.0
    used_at: float = 0.0
    pinned: bool = False
    unload_after_seconds: float | None = None

    def on(self, device: Device) -> int:
        return self.bytes_on.get(device, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and when to call `decide` again at the latest.

    `swaps` are the models for which others are evicted.
    """

    load: tuple[str, ...] = ()
    evict: tuple[str, ...] = ()
    swaps: tuple[str, ...] = ()
    again_seconds: float | None = None


def fill(models: Iterable[Model], budgets: Bytes) -> tuple[str, ...]:
    """Return what to load at the start: as many as fit, in the order given, pinned ones first."""
    draft = _Draft(models, budgets)
    pinned_first = sorted(draft.models, key=lambda model: not model.pinned)
    return tuple(model.name for model in pinned_first if draft.admit(model))


def decide(models: Iterable[Model], budgets: Bytes, swapped_at: Mapping[Device, float], now: float) -> Decision:
    """Return what to load and to evict.

    The models that come, are in and leave never take more than a budget. What waits longest is loaded first; what was
    used longest ago is evicted first, and what is in use only after LONGEST_WAIT_SECONDS.
    """
    draft = _Draft(models, budgets)
    draft.evict(model for model in draft.evictable() if _idle_in(model, now) == 0)
    for model in draft.evictable():  # after a reload that shrank its budget
        if any(draft.free(device, soon=True) < 0 for device in model.bytes_on):
            draft.evict([model])
    again = [seconds for model in draft.evictable() if (seconds := _idle_in(model, now)) is not None]
    load, swaps = [], []
    kept: set[Device] = set()  # what is freed there is for what waits longest
    for model in draft.waiting():
        if kept.isdisjoint(model.bytes_on):
            if draft.admit(model):
                load.append(model.name)
            else:
                victims, wait = _victims(draft, model, swapped_at, now)
                draft.evict(victims)
                swaps += [model.name] if victims else []
                again += [] if wait is None else [wait]
        kept.update(model.bytes_on)
    return Decision(tuple(load), tuple(draft.evicted), tuple(swaps), min(again, default=None))


class _Draft:
    """The models as they will be when what has been decided so far is carried out."""

    def __init__(self, models: Iterable[Model], budgets: Bytes) -> None:
        self.models = list(models)
        self._states = {model.name: model.state for model in self.models}
        self._budgets = budgets
        self.evicted: list[str] = []

    def free(self, device: Device, *, soon: bool = False) -> int:
        """Return what nothing takes of a device; `soon`: when all that leaves has left."""
        absent = {"out", "leaving"} if soon else {"out"}
        taken = sum(model.on(device) for model in self.models if self._states[model.name] not in absent)
        return self._budgets.get(device, 0) - taken

    def waiting(self) -> list[Model]:
        """What is asked for, the oldest request first."""
        asked = [(model.asked_at, model.name, model) for model in self.models if model.asked_at is not None]
        return [model for _, name, model in sorted(asked, key=lambda one: one[:2]) if self._states[name] == "out"]

    def evictable(self) -> list[Model]:
        """What may be evicted, in that order."""
        found = [model for model in self.models if self._states[model.name] == "in" and not model.pinned]
        return sorted(found, key=lambda model: (model.leases > 0, model.used_at))

    def admit(self, model: Model) -> bool:
        fits = all(self.free(device) >= size for device, size in model.bytes_on.items())
        if fits:
            self._states[model.name] = "coming"
        return fits

    def evict(self, models: Iterable[Model]) -> None:
        for model in models:
            self._states[model.name] = "leaving"
            self.evicted.append(model.name)


def _victims(
    draft: _Draft, model: Model, swapped_at: Mapping[Device, float], now: float
) -> tuple[list[Model], float | None]:
    """Return what to evict for a model; nothing when that must wait, and for how many seconds."""
    sizes = model.bytes_on.items()
    lacks = {device: lack for device, size in sizes if (lack := size - draft.free(device, soon=True)) > 0}
    if not lacks:
        return [], None  # enough is leaving
    pause = max(swapped_at.get(device, -SWAP_EVERY_SECONDS) for device in lacks) + SWAP_EVERY_SECONDS - now
    if pause > 0:
        return [], pause
    ripe_in = [(one, _ripe_in(one, model, now)) for one in draft.evictable()]
    chosen = _fewest([one for one, seconds in ripe_in if seconds <= 0], lacks)
    return chosen, None if chosen else min((seconds for _, seconds in ripe_in if seconds > 0), default=None)


def _ripe_in(one: Model, asked: Model, now: float) -> float:
    """Return after how many seconds it may be evicted for the model asked for; 0 or less: now."""
    settled = one.loaded_at + SWAP_EVERY_SECONDS - now
    if one.leases == 0:
        return settled
    asked_at = now if asked.asked_at is None else asked.asked_at
    return max(settled, asked_at + LONGEST_WAIT_SECONDS - now)


def _idle_in(model: Model, now: float) -> float | None:
    """Return the seconds until `unload_after_seconds` is over; None: no such limit, or in use."""
    if model.unload_after_seconds is None or model.leases:
        return None
    return max(0.0, model.used_at + model.unload_after_seconds - now)


def _fewest(ordered: Iterable[Model], lacks: Mapping[Device, int]) -> list[Model]:
    """Return models from the front of `ordered` that free enough, none superfluous; [] if all do not suffice."""
    chosen = list(ordered)
    for model in reversed(chosen):
        others = [one for one in chosen if one is not model]
        if _is_enough(others, lacks):
            chosen = others
    return chosen if _is_enough(chosen, lacks) else []


def _is_enough(chosen: list[Model], lacks: Mapping[Device, int]) -> bool:
    return all(sum(model.on(device) for model in chosen) >= lack for device, lack in lacks.items())

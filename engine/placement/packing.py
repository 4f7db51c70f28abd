"""Puts models of known size into devices without exceeding any: a search that is the same in whatever order they come.

Models that take turns share a device: of them the largest counts. Which variants to try is engine/placement/plan.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.placement.types import Device, Need

# An office's handful of models needs some dozens; past that a layout counts as not found.
_MOST_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model to place: `needs` are its choices, the fewest GPUs first; `shared`: it takes turns with others."""

    id: str
    needs: tuple[Need, ...]
    shared: bool = False

    @property
    def size(self) -> int:
        return max(need.weights_bytes + need.activations_bytes + need.kv_bytes for need in self.needs)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a model went: positions among the devices, and its bytes on each."""

    need: Need
    places: tuple[int, ...]
    device_bytes: int
    shared: bool


@dataclass(slots=True)
class Layout:
    """Devices being filled. `always` are bytes that are always taken, `turns` those of whoever's turn it is."""

    devices: Sequence[Device]
    always: list[int]
    turns: list[int]
    spots: dict[str, Spot] = field(default_factory=dict)

    @classmethod
    def empty(cls, devices: Sequence[Device]) -> Layout:
        return cls(devices, [0] * len(devices), [0] * len(devices))

    def free(self, place: int) -> int:
        return self.devices[place].budget_bytes - self.always[place] - self.turns[place]


def pack(wanted: Sequence[Wanted], devices: Sequence[Device]) -> Layout | None:
    """Return a layout with every model in it, or None. `devices` ends with RAM."""
    order = sorted(wanted, key=lambda model: (model.shared, -model.size, model.id))
    layout = Layout.empty(devices)
    return layout if _fill(layout, order, [_MOST_STEPS]) else None


def _fill(layout: Layout, rest: Sequence[Wanted], steps: list[int]) -> bool:
    if not rest:
        return True
    model = rest[0]
    for need in model.needs:
        for places, device_bytes in _choices(layout, need, shared=model.shared):
            steps[0] -= 1
            if steps[0] < 0:
                return False
            before = (list(layout.always), list(layout.turns))
            if _take(layout, need, places, device_bytes, shared=model.shared):
                layout.spots[model.id] = Spot(need, places, device_bytes, model.shared)
                if _fill(layout, rest[1:], steps):
                    return True
                del layout.spots[model.id]
            layout.always, layout.turns = before
    return False


def _choices(layout: Layout, need: Need, *, shared: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield sets of devices, the emptiest first; sets that look the same are tried once."""
    found: list[tuple[tuple[object, ...], int, int]] = []
    for place, device in enumerate(layout.devices):
        size = need.bytes_on(device) if need.runs_on(device) else None
        if size is None:
            continue
        # Who takes turns goes where others do already, so that few devices are shared
        more = max(0, size - layout.turns[place]) if shared else size
        found.append(((more if shared else 0, -layout.free(place), -device.total_bytes, device.name), place, size))
    found.sort()
    width = max(1, need.split)
    tried: set[tuple[object, ...]] = set()
    for first in range(len(found) - width + 1):
        window = found[first : first + width]
        look = tuple(sight for sight, _, _ in window)
        if look not in tried:
            tried.add(look)
            yield tuple(place for _, place, _ in window), max(size for _, _, size in window)


def _take(layout: Layout, need: Need, places: tuple[int, ...], device_bytes: int, *, shared: bool) -> bool:
    taken = dict.fromkeys(places, device_bytes)
    ram = len(layout.devices) - 1
    if need.ram_bytes:
        taken[ram] = taken.get(ram, 0) + need.ram_bytes
    for place, size in taken.items():
        if shared:
            layout.turns[place] = max(layout.turns[place], size)
        else:
            layout.always[place] += size
    return all(layout.free(place) >= 0 for place in taken)

"""Gives what a layout leaves free to KV caches, and says how each model that takes turns leaves its device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.placement.hardware import GIB
from engine.placement.types import DeviceUse, Placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.placement.packing import Layout, Spot
    from engine.placement.types import Device, SwapBy

# Of what is left on a device; the rest stays free for what sizes that were only stated get wrong.
_TO_KV = 0.75
# What a vLLM engine that sleeps keeps of each of its GPUs: CUDA's context, kernels and communication buffers.
ASLEEP_BYTES = int(0.75 * GIB)


def asleep_bytes(sleepers: int) -> int:
    """Return what sleepers keep of a GPU that they share, while one of them is awake."""
    return ASLEEP_BYTES * max(0, sleepers - 1)


def placed_models(layout: Layout) -> list[Placed]:
    """Return every model of the layout with its share; who shares with nobody after all is resident."""
    names = sorted(layout.spots)
    turning = {name for name in names if len(_companions(layout, name)) > 1}
    asleep = _sleepers(layout, turning)
    left = [max(0, layout.free(place)) for place in range(len(layout.devices))]
    for place in range(len(left)):
        here = [name for name in asleep if place in layout.spots[name].places]
        left[place] = max(0, left[place] - asleep_bytes(len(here)))
    return [_placed(layout, name, turning, asleep, left) for name in names]


def uses(layout: Layout, placed: Sequence[Placed]) -> tuple[DeviceUse, ...]:
    """Return what is taken of each device, KV caches included."""
    return tuple(
        _use(device, [(one, _bytes_on(one, device)) for one in placed if _bytes_on(one, device)])
        for device in layout.devices
    )


def _use(device: Device, here: Sequence[tuple[Placed, int]]) -> DeviceUse:
    # Weights that sleep in RAM are there whoever's turn it is; on a GPU whoever sleeps keeps a little
    turning = [(one, size) for one, size in here if one.state == "swapped" and not _sleeps_in(one, device)]
    always = sum(size for _, size in here) - sum(size for _, size in turning)
    largest = max((size for _, size in turning), default=0)
    asleep = sum(one.swap_by == "sleep" for one, _ in turning)
    names = tuple(sorted(one.id for one, _ in here))
    return DeviceUse(device, always + largest + asleep_bytes(asleep), names)


def _bytes_on(one: Placed, device: Device) -> int:
    if device.index is None:
        return one.ram_bytes + (0 if one.gpus else one.device_bytes)
    return one.device_bytes if device.index in one.gpus else 0


def _sleeps_in(one: Placed, device: Device) -> bool:
    return device.index is None and one.swap_by == "sleep"


def _ram(layout: Layout) -> int:
    return len(layout.devices) - 1


def _companions(layout: Layout, name: str) -> list[str]:
    """Who takes turns with a model on one of its devices, itself included."""
    spot = layout.spots[name]
    if not spot.shared:
        return []
    others = ((other, layout.spots[other]) for other in sorted(layout.spots))
    return [other for other, seen in others if seen.shared and set(seen.places) & set(spot.places)]


def _sleepers(layout: Layout, turning: set[str]) -> set[str]:
    """Chat models sleep, if RAM holds their weights and their GPUs what sleepers keep; others end and start again."""
    ram = _ram(layout)
    chats = {name for name in turning if layout.spots[name].need.context_length}
    names = sorted(name for name in chats if ram not in layout.spots[name].places)
    weights = sum(_all_weights(layout.spots[name]) for name in names)
    roomy = all(
        layout.free(place) >= asleep_bytes(sum(place in layout.spots[name].places for name in names))
        for place in range(ram)
    )
    return set(names) if len(names) > 1 and roomy and weights <= layout.free(ram) else set()


def _all_weights(spot: Spot) -> int:
    return spot.need.weights_bytes * max(1, spot.need.split)


def _placed(layout: Layout, name: str, turning: set[str], asleep: set[str], left: Sequence[int]) -> Placed:
    spot = layout.spots[name]
    need = spot.need
    swaps = name in turning
    more = min(_more_kv(layout, name, place, left[place]) for place in spot.places)
    device_bytes = spot.device_bytes + more
    kv_bytes = device_bytes - need.weights_bytes - need.activations_bytes if need.chat_bytes or need.share else 0
    gpus = tuple(sorted(index for place in spot.places if (index := layout.devices[place].index) is not None))
    totals = [layout.devices[place].total_bytes for place in spot.places]
    swap_by: SwapBy | None = ("sleep" if name in asleep else "unload") if swaps else None
    return Placed(
        name,
        "swapped" if swaps else "resident",
        why="",
        variant=need.variant,
        need=need,
        gpus=gpus,
        device_bytes=device_bytes,
        kv_bytes=kv_bytes,
        utilization=math.floor(device_bytes / min(totals) * 10_000) / 10_000 if gpus else None,
        swap_by=swap_by,
        ram_bytes=need.ram_bytes + (_all_weights(spot) if name in asleep else 0),
    )


def _more_kv(layout: Layout, name: str, place: int, left: int) -> int:
    """Return what a chat model gets beyond its minimum: an even part of what is left, and of its turn all of it."""
    spot = layout.spots[name]
    # On a CPU a KV cache is filled with zeros at the start: no more of it than was asked for
    if place == _ram(layout) or not _takes_more(spot):
        return 0
    here = [seen for seen in layout.spots.values() if place in seen.places and _takes_more(seen)]
    parts = sum(not seen.shared for seen in here) + any(seen.shared for seen in here)
    of_its_turn = layout.turns[place] - spot.device_bytes if spot.shared else 0
    return int(_TO_KV * left / parts) + of_its_turn


def _takes_more(spot: Spot) -> bool:
    return spot.need.chat_bytes > 0 and spot.need.share is None and not spot.need.fixed_kv

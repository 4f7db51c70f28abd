"""Puts models of known size into devices without exceeding any, then gives what is left to KV caches.

The result does not depend on the order of models and devices. Of models that take turns on a device, only the
largest counts. plan.py chooses the variants to try.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from engine.placement.hardware import GIB
from engine.placement.types import Device, DeviceUse, Need, Placed, State, SwapBy

# A handful of models needs some dozens of steps; past this limit the search ends without a layout.
_MOST_STEPS = 4000
# Kept free for errors in sizes that were not measured: a part of these sizes, or of what is left if that is less.
_OF_STATED, _OF_LEFT = 0.125, 0.25
# Tokens that coding agents need: as many models as possible get one conversation of that length.
LONG_CONTEXT = 65536
# What a vLLM engine that sleeps keeps of each of its GPUs: CUDA's context, kernels and communication buffers.
ASLEEP_BYTES = int(0.75 * GIB)
_Window: TypeAlias = tuple[tuple[int, ...], int]


@dataclass(slots=True)
class Layout:
    """Devices, RAM last, and the models on them so far: `swapped` are those that may take turns."""

    devices: Sequence[Device]
    placed: dict[str, Placed] = field(default_factory=dict)

    def turn_bytes(self, index: int | None) -> int:
        """Return what models that take turns take of a device: the bytes of the largest."""
        return max((one.bytes_on(index) for one in self.placed.values() if one.state == "swapped"), default=0)

    def free(self, device: Device) -> int:
        resident = sum(one.bytes_on(device.index) for one in self.placed.values() if one.state == "resident")
        return device.budget_bytes - resident - self.turn_bytes(device.index)

    def put(self, name: str, state: State, need: Need, window: _Window) -> bool:
        """Place a model. False: a device has no room."""
        gpus, size = window
        one = Placed(name, state, "", need.variant, need, gpus, device_bytes=size, ram_bytes=need.ram_bytes)
        self.placed[name] = one
        return all(self.free(device) >= 0 for device in self.devices if one.bytes_on(device.index))


def asleep_bytes(sleepers: int) -> int:
    """Return what sleeping models keep of a GPU that they share, while one of them is awake."""
    return ASLEEP_BYTES * max(0, sleepers - 1)


def pack(
    wanted: Mapping[str, Sequence[Need]], devices: Sequence[Device], shared: Collection[str] = ()
) -> Layout | None:
    """Return a layout with every model in it, or None.

    `wanted` has for each model what it may take, the fewest GPUs first; those in `shared` take turns. `devices` ends
    with RAM.
    """
    sizes = {name: max(need.least_bytes for need in needs) for name, needs in wanted.items()}
    order = sorted(wanted, key=lambda name: (name in shared, -sizes[name], name))
    layout = Layout(devices)
    steps = iter(range(_MOST_STEPS))
    return layout if _fill(layout, [(name, wanted[name], name in shared) for name in order], steps) else None


def add_replica(layout: Layout, first: Placed, engine: str) -> bool:
    """Put one more engine of a model, with its context, on GPUs without a chat model, or into RAM. False: no room."""
    need = _need(first)
    kv_bytes = max(need.kv_bytes, need.chat_bytes(first.context_length))
    need = replace(need, kv_bytes=kv_bytes, longest_context=need.longest_context and (first.context_length or 0))
    taken = {index for one in layout.placed.values() if _need(one).context_length for index in one.gpus}
    free = Layout([device for device in layout.devices if device.index not in taken | set(first.gpus)], layout.placed)
    for window in reversed(tuple(_windows(free, need, shared=False))):  # the fullest first
        if free.put(engine, "resident", need, window):
            return True
        del layout.placed[engine]
    return False


def _fill(layout: Layout, rest: Sequence[tuple[str, Sequence[Need], bool]], steps: Iterator[int]) -> bool:
    if not rest:
        return True
    name, needs, shared = rest[0]
    for need in needs:
        for window in _windows(layout, need, shared=shared):
            if next(steps, None) is None:
                return False
            if layout.put(name, "swapped" if shared else "resident", need, window) and _fill(layout, rest[1:], steps):
                return True
            del layout.placed[name]
    return False


def _windows(layout: Layout, need: Need, *, shared: bool) -> Iterator[_Window]:
    """Yield GPUs (none: RAM) and the bytes on each, the emptiest first; of equivalent sets only one."""
    found: list[tuple[tuple[object, ...], int, int]] = []
    for position, device in enumerate(layout.devices):
        size = need.bytes_on(device) if need.runs_on(device) else None
        if size is None:
            continue
        # A model that takes turns goes where others do already, so that few devices are shared
        more = max(0, size - layout.turn_bytes(device.index)) if shared else 0
        found.append(((more, -layout.free(device), -device.total_bytes, device.name), position, size))
    found.sort()
    width = max(1, need.split)
    tried: set[tuple[object, ...]] = set()
    for first in range(len(found) - width + 1):
        window = found[first : first + width]
        look = tuple(sight for sight, _, _ in window)
        if look not in tried:
            tried.add(look)
            indices = (layout.devices[position].index for _, position, _ in window)
            gpus = tuple(sorted(index for index in indices if index is not None))
            yield gpus, max(size for _, _, size in window)


def shared_out(layout: Layout) -> list[Placed]:
    """Return every model with its KV cache, and how it is swapped; one that shares with none is resident."""
    swapped = [one for one in layout.placed.values() if one.state == "swapped"]
    turning = {
        one.id for one in swapped for other in swapped if one is not other and set(one.places) & set(other.places)
    }
    asleep = _sleepers(layout, turning)
    swap_by: dict[str, SwapBy] = {name: "sleep" if name in asleep else "unload" for name in turning}
    return [_with_share(layout, layout.placed[name], swap_by) for name in sorted(layout.placed)]


def _sleepers(layout: Layout, turning: Collection[str]) -> set[str]:
    """Return the chat models that sleep: all, or none if RAM lacks room for weights, or a GPU for what they keep."""
    *gpus, ram = layout.devices
    chats = [one for one in layout.placed.values() if one.id in turning and one.gpus and _need(one).context_length]
    weights = sum(_need(one).all_weights_bytes for one in chats)
    enough = all(layout.free(gpu) >= asleep_bytes(sum(gpu.index in one.gpus for one in chats)) for gpu in gpus)
    return {one.id for one in chats} if len(chats) > 1 and enough and weights <= layout.free(ram) else set()


def _with_share(layout: Layout, one: Placed, swap_by: Mapping[str, SwapBy]) -> Placed:
    need, devices = _need(one), [device for device in layout.devices if device.index in one.places]
    size = one.device_bytes + min(_more_kv(layout, one, device, swap_by) for device in devices)
    has_kv = need.cache or need.share or need.fixed_kv
    # vLLM refuses to start if less is free. It checks after its process has allocated working memory, like CUDA's
    asked = size - (need.activations_bytes if has_kv and need.share is None else 0)
    utilization = math.floor(asked / min(device.total_bytes for device in devices) * 10_000) / 10_000
    return replace(
        one,
        state="swapped" if one.id in swap_by else "resident",
        device_bytes=size,
        kv_bytes=size - need.beside_kv_bytes if has_kv else 0,
        utilization=utilization if one.gpus else None,
        swap_by=swap_by.get(one.id),
        ram_bytes=need.ram_bytes + (need.all_weights_bytes if swap_by.get(one.id) == "sleep" else 0),
    )


def _more_kv(layout: Layout, one: Placed, device: Device, swap_by: Mapping[str, SwapBy]) -> int:
    """Return what a chat model gets beyond its minimum: a part of what is left, and all that is free in its turn."""
    # On a CPU a KV cache is filled with zeros at the start: it gets no more than was asked for
    if device.index is None or not _takes_more(one):
        return 0
    here = [other for other in layout.placed.values() if device.index in other.places]
    asleep = sum(swap_by.get(other.id) == "sleep" for other in here)
    left = max(0, max(0, layout.free(device)) - asleep_bytes(asleep))
    stated = sum(_stated_bytes(other) for other in here if other.state == "resident")
    stated += max((_stated_bytes(other) for other in here if other.state == "swapped"), default=0)
    left -= int(min(_OF_STATED * stated, _OF_LEFT * left))
    # Models that take turns have one part together
    wants: dict[str, _Want] = {}
    for other in here:
        if _takes_more(other):
            name, need = other.id if other.state == "resident" else "", _need(other)
            has = need.kv_bytes + _of_its_turn(layout, other, device)
            most = need.chat_bytes(need.longest_context or need.context_length)
            missing = _Want(max(0, min(need.chat_bytes(LONG_CONTEXT), most) - has), max(0, most - has))
            wants[name] = max(wants.get(name, missing), missing)
    mine = one.id if one.state == "resident" else ""
    return _part(left, wants, mine) + _of_its_turn(layout, one, device)


class _Want(NamedTuple):
    """Bytes that are missing for one long conversation, and for one of the longest context."""

    long: int
    longest: int


def _part(left: int, wants: Mapping[str, _Want], mine: str) -> int:
    """Return one part of what is left.

    As many models as possible get one long conversation; the rest is divided evenly, first up to the longest context of
    each.
    """
    given = dict.fromkeys(wants, 0)
    for name, want in sorted(wants.items(), key=lambda item: (item[1].long, item[0])):
        if want.long <= left:
            given[name] = want.long
            left -= want.long
    missing = sorted((want.longest - given[name], name) for name, want in wants.items())
    for at, (wanted, name) in enumerate(missing):
        part = min(wanted, left // (len(missing) - at))
        given[name] += part
        left -= part
    return given[mine] + left // len(wants)


def _stated_bytes(one: Placed) -> int:
    need = _need(one)
    return need.activations_bytes + (0 if need.measured else need.weights_bytes)


def _of_its_turn(layout: Layout, one: Placed, device: Device) -> int:
    """Return how much larger the largest model is that it takes turns with."""
    return layout.turn_bytes(device.index) - one.device_bytes if one.state == "swapped" else 0


def _takes_more(one: Placed) -> bool:
    need = _need(one)
    return need.cache is not None and need.share is None and not need.fixed_kv


def _need(one: Placed) -> Need:
    assert one.need is not None  # noqa: S101  # every model of a layout has one
    return one.need


def uses(devices: Sequence[Device], placed: Sequence[Placed]) -> tuple[DeviceUse, ...]:
    """Return what is taken of each device, KV caches included."""
    found = []
    for device in devices:
        here = {one.id: one for one in placed if one.bytes_on(device.index)}
        # Weights that sleep in RAM are always there; on a GPU a sleeper keeps a little
        in_ram = device.index is None
        turning = [one for one in here.values() if one.swap_by and not (in_ram and one.swap_by == "sleep")]
        always = sum(one.bytes_on(device.index) for one in here.values() if one not in turning)
        largest = max((one.bytes_on(device.index) for one in turning), default=0)
        asleep = asleep_bytes(sum(one.swap_by == "sleep" for one in turning))
        found.append(DeviceUse(device, always + largest + asleep, tuple(sorted(here))))
    return tuple(found)

"""Says by how much models do not fit, with the numbers, and what would make a single one fit.

Changes that make all of them fit are engine/placement/change.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.placement.hardware import GIB
from engine.placement.types import Lack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import ModelSpec
    from engine.placement.types import Device, Need

GPU_SIZES_GIB = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192, 288)
CONTEXT_STEP = 1024
SHORTEST_CONTEXT = 2048


def lack_of(specs: Sequence[ModelSpec], needs: Sequence[Sequence[Need]], devices: Sequence[Device]) -> Lack:
    """Explain why a model does not fit alone (`needs`: of each variant), or several not together (of each model).

    The change of a `Lack` of memory is what would do for a model alone; of several it is left open.
    """
    if len(specs) > 1:
        return _together(specs, needs, devices)
    message, needed, available, change = _alone(specs[0].id, needs, devices)
    options = [need for choice in needs for need in choice]
    able = any(need.runs_on(device) for need in options for device in devices)
    split = min((max(1, need.split) for need in options), default=1)
    on_gpus = any(need.split for need in options)
    return Lack((specs[0].id,), message, needed, available, change, of_memory=able, on_gpus=on_gpus, split=split)


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def why_alone(model: str, needs: Sequence[Sequence[Need]], devices: Sequence[Device]) -> tuple[str, str]:
    """Return why no variant of a model fits, with the numbers, and the smallest change that would do."""
    message, _, _, change = _alone(model, needs, devices)
    return message, change


def _alone(model: str, needs: Sequence[Sequence[Need]], devices: Sequence[Device]) -> tuple[str, int, int, str]:
    options = [need for choice in needs for need in choice]
    if not options:
        gpus = len(devices) > 1
        message = f"{model}: none of its variants runs on a {'GPU' if gpus else 'CPU'}"
        change = "add a variant for this device in models.yaml" if gpus else "a GPU, or a variant that `runs_on: any`"
        return message, 0, 0, change
    lacking = [(_missing(need, device), need, device) for need in options for device in devices if _kind(need, device)]
    missing, need, device = min(lacking, key=lambda one: (max(0, one[0]) * max(1, one[1].split), one[1].split))
    needed = _least(need, device)
    place = "in RAM" if device.index is None else f"on {'one GPU' if need.split == 1 else f'each of {need.split} GPUs'}"
    what = f"{need.variant.id}, its smallest, needs {gib(needed)} {place}"
    if not need.runs_on(device):
        message = f"{model}: {need.variant.id} needs a GPU of compute capability {need.variant.min_compute_capability}"
        return message, needed, device.budget_bytes, "a newer GPU, or a variant for older ones in models.yaml"
    if need.share is not None and need.bytes_on(device) is None:
        share = min(1.0, (needed + device.margin_bytes) / device.total_bytes)
        message = (
            f"{model}: {what}; gpu_memory_utilization {need.share:g} gives it {gib(need.share * device.total_bytes)}"
        )
        return message, needed, int(need.share * device.total_bytes), f"gpu_memory_utilization: {share:.2f}, or none"
    message = f"{model}: {what}; there {_there(device)}, {gib(missing)} too little"
    return message, needed, device.budget_bytes, _change(need, device, missing)


def _kind(need: Need, device: Device) -> bool:
    return (need.split == 0) == (device.index is None)


def _least(need: Need, device: Device) -> int:
    if need.share is not None and need.bytes_on(device) is not None:
        return int(need.share * device.total_bytes)
    return need.weights_bytes + need.activations_bytes + (need.kv_bytes if need.share is None else need.chat_bytes)


def _missing(need: Need, device: Device) -> int:
    return _least(need, device) - device.budget_bytes


def _there(device: Device) -> str:
    parts = [f"{gib(device.margin_bytes)} stay free"]
    if device.foreign_bytes:
        most = "up to " if device.index is None else ""
        parts.insert(0, f"{most}{gib(device.foreign_bytes)} are taken by others")
    if device.ours_bytes:
        parts.append(f"{gib(device.ours_bytes)} that the running server has count as free")
    return f"are {gib(device.budget_bytes)} of {gib(device.total_bytes)} ({', '.join(parts)})"


def _change(need: Need, device: Device, missing: int) -> str:
    """Lower the context if that is enough; else ask for memory."""
    changes: list[str] = []
    if need.context_length and need.chat_bytes and not need.fixed_kv and need.share is None:
        chats = need.kv_bytes / need.chat_bytes
        per_token = need.chat_bytes / need.context_length
        shorter = int((need.kv_bytes - missing) / chats / per_token) // CONTEXT_STEP * CONTEXT_STEP
        if shorter >= SHORTEST_CONTEXT:
            changes.append(f"context_length: {shorter} in place of {need.context_length}")
    if device.foreign_bytes >= missing:
        changes.append(f"end the other processes there, which hold {gib(device.foreign_bytes)}")
    if not changes:
        changes.append(_more_memory(need, device, missing))
    return ", or ".join(changes)


def _more_memory(need: Need, device: Device, missing: int) -> str:
    if device.index is None:
        return f"{gib(missing)} more RAM"
    # The margin grows with the GPU, so it is counted anew for each size
    needed = _least(need, device) + device.foreign_bytes
    enough = (size for size in GPU_SIZES_GIB if size * GIB - max(GIB // 2, int(0.05 * size * GIB)) >= needed)
    size = next(enough, None)
    named = f"{need.split} GPUs" if need.split > 1 else "a GPU"
    return f"{named} of {size} GiB" if size else f"{named} with {gib(missing)} more, or a smaller variant"


def _together(specs: Sequence[ModelSpec], needs: Sequence[Sequence[Need]], devices: Sequence[Device]) -> Lack:
    ram = devices[-1]
    smallest = {
        spec.id: min(choice, key=lambda need: need.weights_bytes) for spec, choice in zip(specs, needs, strict=True)
    }
    in_ram = {name: _least(need, ram) if need.split == 0 else need.ram_bytes for name, need in smallest.items()}
    kept = [spec.id for spec in specs if getattr(spec, "keep_loaded", False)]
    turns = (
        f" while {', '.join(kept)} stay{'s' if len(kept) == 1 else ''} loaded (`keep_loaded`)"
        if kept
        else ", even in turns"
    )
    needed = sum(in_ram.values())
    if needed > ram.budget_bytes:
        names = tuple(name for name, size in in_ram.items() if size)
        message = (
            f"{', '.join(names)}: together they need {gib(needed)} in RAM and do not fit{turns}; there {_there(ram)}"
        )
        return Lack(names, message, needed, ram.budget_bytes, "")
    on_gpus = {name: need for name, need in smallest.items() if need.split}
    needed = sum(_least(need, devices[0]) * need.split for need in on_gpus.values())
    available = sum(device.budget_bytes for device in devices[:-1])
    need = f"they need {gib(needed)} on GPUs, where {gib(available)} may be used, and do not fit{turns}"
    message = f"{', '.join(on_gpus)}: {need}"
    split = max((need.split for need in on_gpus.values()), default=1)
    return Lack(tuple(on_gpus), message, needed, available, "", on_gpus=True, split=split)

"""A plan as text and as plain data: why each model is where it is, or by how much models do not fit.

plan.py finds changes that make all models fit; this file those for one model alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.config import ModelSpec, SpeechModelSpec
from engine.placement.hardware import GIB, Hardware
from engine.placement.packing import LONG_CONTEXT, pack
from engine.placement.types import Device, DeviceUse, Need, Placed, Plan, Refusal

GPU_SIZES_GIB = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192, 288)
SHORTEST_CONTEXT = 2048


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def why_placed(one: Placed, offered: Sequence[Sequence[Need]], devices: Sequence[Device], *, own: bool) -> str:
    """Say what a model's memory is made of, how it takes turns, and why it has no better variant of those offered."""
    need = one.need
    assert need is not None  # noqa: S101  # only models that have a place are explained
    parts = [f"{gib(need.weights_bytes)} weights{' (measured)' if need.measured else ''}"]
    parts.append(f"{gib(need.activations_bytes)} working memory")
    parts += [f"{gib(need.adapters_bytes)} for its adapters"] if need.adapters_bytes else []
    if one.kv_bytes:
        plural = "s" if one.chats > 1 else ""
        room = f" (room for {one.chats} conversation{plural} of {one.context_length} tokens)" if one.chats else ""
        parts.append(f"{gib(one.kv_bytes)} KV cache{room}")
    text = f"{', '.join(parts)}{' on each GPU' if len(one.gpus) > 1 else ''}."
    if one.sequences is not None and need.cache is not None:
        text += f" At most {one.sequences} requests run at the same time, not {need.sequences}: its KV cache has "
        text += f"{need.cache.blocks(one.kv_bytes)} blocks, and each request takes one for its states."
    if need.share is not None:
        text += f" models.yaml gives it {need.share:g} of the GPU."
    text += _turns(one)
    if one.ram_bytes and one.swap_by != "sleep":
        text += f" {gib(one.ram_bytes)} of weights wait in RAM."
    return text + (" It is the folder that you put there." if own else _why_no_better(need, one.id, offered, devices))


def _why_no_better(used: Need, model: str, offered: Sequence[Sequence[Need]], devices: Sequence[Device]) -> str:
    better: Sequence[Need] = ()
    for needs in offered:
        if needs and needs[0].variant.id == used.variant.id:
            break
        better = needs or better
    if not better:
        return ""
    if pack({model: better}, devices) is not None:
        return f" {better[0].variant.id} would not fit beside the others."
    reason = lack_alone(model, [better], devices).message.partition(": ")[2]
    return f" {reason.replace(', its smallest,', '')}."


def why_demo(
    one: Placed,
    spec: ModelSpec,
    offered: Sequence[Sequence[Need]],
    devices: Sequence[Device],
    change: Callable[[Refusal], str],
) -> str:
    """Say why nothing better than the demo answers, and what would `change` that."""
    needs = [need for need in offered if need]
    if not spec.variants:
        is_speech = isinstance(spec, SpeechModelSpec)
        why = "No variants in models.yaml." if is_speech else "The demo answers: models.yaml names no variants."
    elif not offered:
        why = "The demo answers: none of its variants is here."
    elif any(pack({spec.id: choice}, devices) is not None for choice in needs):
        why = "The demo answers: beside the others nothing else fits, even in turns."
    else:
        lack = lack_alone(spec.id, needs, devices)
        why = f"The demo answers: {lack.message.partition(': ')[2]}."
        why += f" Smallest change: {change(lack) or 'a smaller variant in models.yaml'}."
    return why + _turns(one)


def _turns(one: Placed) -> str:
    if one.swap_by is None:
        return ""
    return f" Takes turns: {'its weights wait in RAM' if one.swap_by == 'sleep' else 'it is stopped and loaded again'}."


def why_unplanned(spec: ModelSpec, *, own: bool, absent: bool) -> str:
    if own:
        return f"The folder {spec.weights} does not say how large it is; keep enough memory free for it."
    if absent and spec.variants:
        return "None of its variants is here, and models.yaml names no demo."
    return "No variants and no demo in models.yaml: it is loaded only if its weights folder is there."


def lack_alone(model: str, needs: Sequence[Sequence[Need]], devices: Sequence[Device]) -> Refusal:
    """Explain why no variant of a model fits (`needs`: of each); `change` is empty if more memory would help."""
    options = [need for choice in needs for need in choice]
    if not options:
        gpus = len(devices) > 1
        message = f"{model}: none of its variants runs on a {'GPU' if gpus else 'CPU'}"
        change = "add a variant for this device in models.yaml" if gpus else "a GPU, or a variant that `runs_on: any`"
        return Refusal((model,), message, 0, 0, change)
    pairs = [(need, _fullest(need, devices)) for need in options]
    need, device = min(pairs, key=lambda pair: (max(0, _missing(*pair)) * max(1, pair[0].split), pair[0].split))
    ram = devices[-1]
    if need.runs_on(device) and _missing(need, device) <= 0 and need.ram_bytes > ram.budget_bytes:
        message = f"{model}: {need.variant.id}, its smallest, keeps {gib(need.ram_bytes)} of weights in RAM; there "
        return Refusal((model,), message + _there(ram), need.ram_bytes, ram.budget_bytes, "")
    message, available = _why_not_on(need, device)
    change = "" if need.runs_on(device) else "a newer GPU, or a variant for older ones in models.yaml"
    split = min(max(1, option.split) for option in options)
    on_gpus = any(option.split for option in options)
    return Refusal((model,), f"{model}: {message}", _least(need, device), available, change, on_gpus, split)


def _fullest(need: Need, devices: Sequence[Device]) -> Device:
    """Return the device with the least room of those that `need` would take."""
    right = [device for device in devices if need.is_kind_of(device)]
    return sorted(right, key=lambda device: _missing(need, device))[max(1, need.split) - 1]


def _why_not_on(need: Need, device: Device) -> tuple[str, int]:
    """Return why a need does not fit on a device of its kind, and what is missing."""
    name, least = need.variant.id, _least(need, device)
    if not need.runs_on(device):
        capability = need.variant.min_compute_capability
        return f"{name} needs a GPU of compute capability {capability}", device.budget_bytes
    place = "in RAM" if device.index is None else f"on {'one GPU' if need.split == 1 else f'each of {need.split} GPUs'}"
    message = f"{name}, its smallest, needs {gib(least)} {place}; "
    if need.share is not None and need.bytes_on(device) is None:
        given = need.share * device.total_bytes
        return f"{message}gpu_memory_utilization {need.share:g} gives it {gib(given)}", int(given)
    return f"{message}there {_there(device)}, {gib(_missing(need, device))} too little", device.budget_bytes


def _least(need: Need, device: Device) -> int:
    size = need.bytes_on(device)
    return need.beside_kv_bytes + need.one_chat_bytes if size is None else size


def _missing(need: Need, device: Device) -> int:
    return _least(need, device) - device.budget_bytes


def _there(device: Device) -> str:
    return f"are {gib(device.budget_bytes)} of {gib(device.total_bytes)} ({_less(device)})"


def _less(device: Device) -> str:
    """Say why less than all of a device may be used."""
    parts = [f"{gib(device.margin_bytes)} kept free"]
    if device.foreign_bytes:
        most = "up to " if device.index is None else ""
        parts.append(f"{most}{gib(device.foreign_bytes)} taken by others")
    if device.ours_bytes:
        parts.append(f"{gib(device.ours_bytes)} of the running server count as free")
    return ", ".join(parts)


def lack_together(wanted: Sequence[tuple[ModelSpec, Sequence[Need]]], devices: Sequence[Device]) -> Refusal:
    """Return why models do not fit together, without a change that would help."""
    *gpus, ram = devices
    smallest = {spec.id: min(needs, key=lambda need: need.weights_bytes) for spec, needs in wanted}
    in_ram = {name: need.ram_bytes if need.split else _least(need, ram) for name, need in smallest.items()}
    kept = [spec.id for spec, _ in wanted if getattr(spec, "keep_loaded", False)]
    stay = f" while {', '.join(kept)} stay{'s' if len(kept) == 1 else ''} loaded (`keep_loaded`)"
    turns = stay if kept else ", even in turns"
    needed = sum(in_ram.values())
    if needed > ram.budget_bytes:
        names = tuple(name for name, size in in_ram.items() if size)
        message = f"together they need {gib(needed)} in RAM and do not fit{turns}; there {_there(ram)}"
        return Refusal(names, f"{', '.join(names)}: {message}", needed, ram.budget_bytes)
    on_gpus = {name: need for name, need in smallest.items() if need.split}
    needed = sum(_least(need, devices[0]) * need.split for need in on_gpus.values())
    available = sum(device.budget_bytes for device in gpus)
    message = f"they need {gib(needed)} on GPUs, where {gib(available)} may be used, and do not fit{turns}"
    split = max((need.split for need in on_gpus.values()), default=1)
    return Refusal(tuple(on_gpus), f"{', '.join(on_gpus)}: {message}", needed, available, on_gpus=True, split=split)


def warnings_of(found: Plan) -> list[str]:
    """Warn if, on GPUs, no model has a context that is long enough for coding agents."""
    chats = [(one.context_length, one.id) for one in found.models if one.variant and one.gpus and one.context_length]
    longest, name = max(chats, default=(LONG_CONTEXT, ""))
    if longest >= LONG_CONTEXT:
        return []
    lack = f"No model takes a conversation of {LONG_CONTEXT} tokens, which coding agents need: the most is {longest}"
    return [f"{lack} ({name}). What helps: a larger GPU, fewer models or smaller variants in models.yaml."]


def headline(machine: Hardware) -> str:
    sizes = [f"{gpu.name}, {gib(gpu.total_bytes)}" for gpu in machine.gpus]
    same = len(set(sizes)) == 1
    gpus = f"{len(sizes)} x {sizes[0]}" if same and len(sizes) > 1 else "; ".join(sizes)
    cpu = f"{machine.cpu_cores} CPU cores, {gib(machine.ram_bytes)} RAM"
    return f"{'Hypothetical machine: ' if machine.imagined else ''}{gpus or 'no GPU'}; {cpu}"


def use_line(use: DeviceUse) -> str:
    device = use.device
    name = "RAM" if device.index is None else f"GPU {device.index}"
    line = f"{name}: {gib(use.used_bytes)} of {gib(device.budget_bytes)} planned"
    idle = "" if use.used_bytes or device.index is None else "; nothing is planned on it: it stays idle"
    return f"{line}, of {gib(device.total_bytes)} in all ({_less(device)}){idle}"


def where(one: Placed) -> str:
    if one.gpus:
        return ("GPU " if len(one.gpus) == 1 else "GPUs ") + ", ".join(str(index) for index in one.gpus)
    return "RAM" if one.need is not None else "-"


def as_data(found: Plan | Refusal, machine: Hardware) -> dict[str, Any]:
    """Return the plan for a machine, or the refusal, as plain data; sizes are bytes."""
    if isinstance(found, Refusal):
        return {
            "fits": False,
            "machine": headline(machine),
            "models": list(found.models),
            "message": found.message,
            "needed_bytes": found.needed_bytes,
            "available_bytes": found.available_bytes,
            "change": found.change,
        }
    return {
        "fits": True,
        "machine": headline(machine),
        "models": [_model_data(one) for one in found.models],
        "warnings": warnings_of(found),
        "devices": [
            {
                "gpu": use.device.index,
                "name": use.device.name,
                "total_bytes": use.device.total_bytes,
                "budget_bytes": use.device.budget_bytes,
                "taken_by_others_bytes": use.device.foreign_bytes,
                "taken_by_us_bytes": use.device.ours_bytes,
                "planned_bytes": use.used_bytes,
                "models": list(use.models),
            }
            for use in found.devices
        ],
    }


def _model_data(one: Placed) -> dict[str, Any]:
    variant, need = one.variant, one.need
    return {
        "id": one.id,
        "state": one.state,
        "swap_by": one.swap_by,
        "variant": variant.id if variant else None,
        "repository": variant.repository if variant else None,
        "revision": variant.revision if variant else None,
        "licence": variant.licence if variant else None,
        "gpus": list(one.gpus),
        "tensor_parallel_size": max(1, need.split) if need else None,
        "context_length": one.context_length,
        "full_length_chats": one.chats,
        "max_num_seqs": one.sequences or (need.sequences or None if need else None),
        "bytes_per_device": one.device_bytes,
        "weights_bytes_per_device": need.weights_bytes if need else 0,
        "adapters_bytes_per_device": need.adapters_bytes if need else 0,
        "kv_cache_bytes_per_device": one.kv_bytes,
        "ram_bytes": one.ram_bytes,
        "measured": need.measured if need else False,
        "replicas": [_replica_data(replica) for replica in one.replicas],
        "why": one.why,
    }


def _replica_data(one: Placed) -> dict[str, Any]:
    """Return what differs between a replica and its model."""
    whole = _model_data(one)
    sizes = ("bytes_per_device", "kv_cache_bytes_per_device", "full_length_chats", "max_num_seqs")
    return {name: whole[name] for name in ("id", "gpus", *sizes)}

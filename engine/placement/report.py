"""The words and the plain data of a plan: why each model is where it is, for people and for `--json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import SpeechModelSpec
from engine.placement.packing import Wanted, pack
from engine.placement.refusal import gib, why_alone
from engine.placement.types import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import Config, ModelSpec
    from engine.config.models import VariantSpec
    from engine.placement.types import Device, DeviceUse, Need, Placed, Plan


def why_placed(
    one: Placed, all_needs: Sequence[Sequence[Need]], alone: set[str], devices: Sequence[Device], *, own: bool
) -> str:
    """Say what a model's memory is made of, who it takes turns with, and what keeps it from the next better variant."""
    need = one.need
    assert need is not None  # noqa: S101  # only models that have a place are explained
    each = "" if len(one.gpus) < 2 else " on each GPU"
    parts = [f"{gib(need.weights_bytes)} weights{' (measured)' if need.measured else ''}"]
    parts.append(f"{gib(need.activations_bytes)} working memory")
    if one.kv_bytes:
        parts.append(f"{gib(one.kv_bytes)} KV cache{_room(one)}")
    sentences = [f"{', '.join(parts)}{each}."]
    if need.share is not None:
        sentences.append(f"models.yaml gives it {need.share:g} of the GPU.")
    if one.swap_by is not None:
        sentences.append(turns_line(one).strip())
    if one.ram_bytes and one.swap_by != "sleep":
        sentences.append(f"{gib(one.ram_bytes)} of weights wait in RAM.")
    if own:
        sentences.append("It is the folder that you put there.")
    else:
        sentences += _why_no_better(one, all_needs, alone, devices)
    return " ".join(sentences)


def _room(one: Placed) -> str:
    if not one.chats or one.need is None:
        return ""
    return f" (room for {one.chats} conversation{'s' if one.chats > 1 else ''} of {one.need.context_length} tokens)"


def _why_no_better(
    one: Placed, all_needs: Sequence[Sequence[Need]], alone: set[str], devices: Sequence[Device]
) -> list[str]:
    better: Sequence[Need] = ()
    for needs in all_needs:
        if needs and one.variant is not None and needs[0].variant.id == one.variant.id:
            break
        better = needs or better
    if not better:
        return []
    name = better[0].variant.id
    if name in alone:
        return [f"{name} would not fit beside the others."]
    message, _ = why_alone(one.id, [better], devices)
    return [f"{message.partition(': ')[2].replace(', its smallest,', '')}."]


def why_demo(spec: ModelSpec, needs: Sequence[Sequence[Need]], devices: Sequence[Device]) -> str:
    """Say why nothing better than the demo answers, and what would change that."""
    if isinstance(spec, SpeechModelSpec) and not spec.variants:
        return "No variants in models.yaml."
    if not spec.variants:
        return "The demo answers: models.yaml names no variants."
    if any(pack([Wanted(spec.id, tuple(needs))], devices) is not None for needs in needs):
        return "The demo answers: beside the others nothing else fits, even in turns."
    message, change = why_alone(spec.id, needs, devices)
    return f"The demo answers: {message.partition(': ')[2]}. Smallest change: {change}."


def better_ones(config: Config, best: Plan | Refusal, now: Plan | Refusal) -> dict[str, VariantSpec]:
    """Return, by model, the variant of `best` that is better than what `now` has; voices aside."""
    found: dict[str, VariantSpec] = {}
    for model, variant in ({} if isinstance(best, Refusal) else best.chosen).items():
        spec = config.models[model]
        served = None if isinstance(now, Refusal) else now.chosen[model]
        if variant not in spec.variants or isinstance(spec, SpeechModelSpec):  # or a folder of the operator's own
            continue
        if served is None or spec.variants.index(variant) < spec.variants.index(served):
            found[model] = variant
    return found


def turns_line(one: Placed) -> str:
    """Say how a model leaves its device to another, after a space; nothing of one that stays."""
    if one.swap_by is None:
        return ""
    how = {"sleep": "its weights wait in RAM", "unload": "it is ended and loaded anew"}
    return f" Takes turns: {how[one.swap_by]}."


def why_unplanned(spec: ModelSpec, *, own: bool, absent: bool = False) -> str:
    """Say why a model is left out of the account."""
    if own:
        return f"The folder {spec.weights} does not say how large it is; keep enough memory free for it."
    if absent and spec.variants:
        return "None of its variants is here, and models.yaml names no demo."
    return "No variants and no demo in models.yaml: it is loaded only if its weights folder is there."


def headline(found: Plan | Refusal) -> str:
    """Describe the machine in one line."""
    machine = found.hardware
    sizes = [f"{gpu.name}, {gib(gpu.total_bytes)}" for gpu in machine.gpus]
    same = len(set(sizes)) == 1
    gpus = f"{len(sizes)} x {sizes[0]}" if same and len(sizes) > 1 else "; ".join(sizes)
    cpu = f"{machine.cpu_cores} CPU cores, {gib(machine.ram_bytes)} RAM"
    return f"{'Imagined: ' if machine.imagined else ''}{gpus or 'no GPU'}; {cpu}"


def use_line(use: DeviceUse) -> str:
    """Describe what is taken of one device."""
    device = use.device
    name = "RAM" if device.index is None else f"GPU {device.index}"
    line = f"{name}: {gib(use.used_bytes)} of {gib(device.budget_bytes)} planned, {gib(device.margin_bytes)} stay free"
    most = "up to " if device.index is None else ""
    others = f", {most}{gib(device.foreign_bytes)} taken by others" if device.foreign_bytes else ""
    ours = f"; {gib(device.ours_bytes)} that the running server has count as free" if device.ours_bytes else ""
    idle = "" if use.used_bytes or device.index is None else "; nothing is planned on it: it stays idle"
    return line + others + ours + idle


def where(one: Placed) -> str:
    """Return where a model goes, in a word or two."""
    if one.gpus:
        return ("GPU " if len(one.gpus) == 1 else "GPUs ") + ", ".join(str(index) for index in one.gpus)
    return "RAM" if one.need is not None else "-"


def as_data(found: Plan | Refusal) -> dict[str, Any]:
    """Return the plan, or the refusal, as plain data; sizes are bytes."""
    if isinstance(found, Refusal):
        return {
            "fits": False,
            "machine": headline(found),
            "models": list(found.lack.models),
            "message": found.message,
            "needed_bytes": found.lack.needed_bytes,
            "available_bytes": found.lack.available_bytes,
            "change": found.change,
        }
    return {
        "fits": True,
        "machine": headline(found),
        "models": [_model_data(one) for one in found.models],
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
        "context_length": need.context_length if need else None,
        "full_length_chats": one.chats,
        "bytes_per_device": one.device_bytes,
        "weights_bytes_per_device": need.weights_bytes if need else 0,
        "kv_cache_bytes_per_device": one.kv_bytes,
        "ram_bytes": one.ram_bytes,
        "measured": need.measured if need else False,
        "why": one.why,
    }

"""How much memory each variant of a model needs: stated or measured weights, activations, and KV cache.

Which device it goes to is engine/placement/packing.py's. Values that models.yaml says under `engine` win.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import ChatModelSpec, SpeechModelSpec
from engine.config.models import VariantSpec
from engine.placement.hardware import GIB
from engine.placement.types import Device, Need

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import ModelSpec
    from engine.placement.hardware import Hardware
    from engine.placement.measured import Footprints

DEFAULT_CONTEXT = 8192

# Left free on every device: what the driver, a display and fragmentation take.
_GPU_MARGIN, _GPU_MARGIN_LEAST = 0.05, GIB // 2
_RAM_MARGIN, _RAM_MARGIN_LEAST = 0.10, 2 * GIB
# What others hold of RAM changes every second: it counts in steps of an eighth of the machine, rounded up, so that the
# plan stays the same from one look to the next.
_RAM_STEPS, _RAM_STEP_LEAST, _RAM_STEP_MOST = 8, GIB, 16 * GIB
# A demo with the libraries that it loads: in RAM 0.6 to 0.7 GiB, measured; on a GPU mostly CUDA's context.
_DEMO_GIB = {"gpu": 1.25, "ram": 0.75}


def devices_of(hardware: Hardware) -> tuple[Device, ...]:
    """Return the GPUs, then RAM."""
    gpus = [
        Device(
            gpu.index,
            gpu.name,
            gpu.total_bytes,
            gpu.foreign_bytes,
            max(_GPU_MARGIN_LEAST, int(_GPU_MARGIN * gpu.total_bytes)),
            gpu.compute_capability,
            gpu.ours_bytes,
        )
        for gpu in hardware.gpus
    ]
    if hardware.ram_for_models_bytes is not None:
        return (*gpus, Device(None, "RAM", hardware.ram_for_models_bytes, 0, 0))
    taken = in_steps(hardware.ram_bytes - hardware.ram_available_bytes - hardware.ram_ours_bytes, hardware.ram_bytes)
    margin = max(_RAM_MARGIN_LEAST, int(_RAM_MARGIN * hardware.ram_bytes))
    return (*gpus, Device(None, "RAM", hardware.ram_bytes, taken, margin, ours_bytes=hardware.ram_ours_bytes))


def in_steps(taken_bytes: int, ram_bytes: int) -> int:
    """Return what others hold of RAM as the plan counts it: never less than it is."""
    step = min(_RAM_STEP_MOST, max(_RAM_STEP_LEAST, ram_bytes // _RAM_STEPS))
    return -(-max(0, taken_bytes) // step) * step


def needs_of(
    spec: ModelSpec, variant: VariantSpec, devices: Sequence[Device], footprints: Footprints
) -> tuple[Need, ...]:
    """Return what a variant needs, for each number of GPUs it can be split over; empty if it cannot run here."""
    gpus = [device for device in devices if device.index is not None]
    if isinstance(spec, SpeechModelSpec):
        return (_in_ram(spec, variant, footprints),)
    if not gpus:
        return () if variant.runs_on == "gpu" else (_in_ram(spec, variant, footprints),)
    if variant.runs_on == "cpu":
        return ()
    names = {gpu.name for gpu in gpus}
    splits = sorted({split for split in _splits(spec, variant) if split <= len(gpus)})
    return tuple(_on_gpus(spec, variant, split, names, footprints) for split in splits)


def demo_need(spec: ModelSpec, devices: Sequence[Device]) -> Need:
    """Return what the demo needs that stands in for a model."""
    on_gpu = len(devices) > 1 and not isinstance(spec, SpeechModelSpec)
    size = _DEMO_GIB["gpu" if on_gpu else "ram"]
    demo = VariantSpec.model_validate({"folder": "demo", "licence": "Apache-2.0", "weights_gib": size})
    return Need(demo, split=1 if on_gpu else 0, weights_bytes=int(size * GIB), activations_bytes=0)


def told(spec: ChatModelSpec, key: str) -> object | None:
    """Return what models.yaml says under `engine`; None when it leaves that to the plan."""
    return getattr(spec.engine, key) if key in spec.engine.model_fields_set else None


def _splits(spec: ModelSpec, variant: VariantSpec) -> tuple[int, ...]:
    if isinstance(spec, ChatModelSpec) and told(spec, "tensor_parallel_size") is not None:
        return (spec.engine.tensor_parallel_size,)
    return variant.tensor_parallel_sizes if isinstance(spec, ChatModelSpec) else (1,)


def _on_gpus(spec: ModelSpec, variant: VariantSpec, split: int, names: set[str], footprints: Footprints) -> Need:
    known = [footprints.of(variant, split, name) for name in sorted(names)]
    measured = [used for used in known if used is not None]
    is_measured = len(measured) == len(known)
    resident = variant.resident_gib or variant.weights_gib
    weights = max(measured) if is_measured else int(resident * GIB / split)
    chat_bytes = _chat_bytes(spec, variant, split)
    share = told(spec, "gpu_memory_utilization") if isinstance(spec, ChatModelSpec) else None
    return Need(
        variant,
        split,
        weights_bytes=weights,
        activations_bytes=int(variant.activations_gib * GIB),
        kv_bytes=_kv_bytes(spec, variant, chat_bytes),
        chat_bytes=chat_bytes,
        ram_bytes=0 if variant.resident_gib is None else int(variant.weights_gib * GIB),
        context_length=_context(spec, variant),
        share=share if isinstance(share, float) else None,
        fixed_kv=isinstance(spec, ChatModelSpec) and spec.engine.kv_cache_gib is not None,
        measured=is_measured,
    )


def _in_ram(spec: ModelSpec, variant: VariantSpec, footprints: Footprints) -> Need:
    measured = footprints.of(variant, 0, "RAM")
    chat_bytes = _chat_bytes(spec, variant, 1)
    return Need(
        variant,
        0,
        weights_bytes=measured or int(variant.weights_gib * GIB),
        activations_bytes=int(variant.activations_gib * GIB),
        kv_bytes=_kv_bytes(spec, variant, chat_bytes),
        chat_bytes=chat_bytes,
        context_length=_context(spec, variant),
        fixed_kv=isinstance(spec, ChatModelSpec) and spec.engine.kv_cache_gib is not None,
        measured=measured is not None,
    )


def _context(spec: ModelSpec, variant: VariantSpec) -> int | None:
    if not isinstance(spec, ChatModelSpec):
        return None
    return spec.engine.context_length or variant.context_length or DEFAULT_CONTEXT


def _chat_bytes(spec: ModelSpec, variant: VariantSpec, split: int) -> int:
    """KV cache of one conversation of full length, on each GPU."""
    context = _context(spec, variant)
    if context is None:
        return 0
    heads_apart = min(split, variant.kv_heads or split)
    return int((context * variant.kv_kib_per_token * 1024 + variant.state_mib_per_chat * (1 << 20)) / heads_apart)


def _kv_bytes(spec: ModelSpec, variant: VariantSpec, chat_bytes: int) -> int:
    if isinstance(spec, ChatModelSpec) and spec.engine.kv_cache_gib is not None:
        return int(spec.engine.kv_cache_gib * GIB)
    return variant.chats * chat_bytes

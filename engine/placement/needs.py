"""How much memory each variant of a model needs: stated or measured weights, activations, and KV cache.

Values under `engine` in models.yaml win. A folder of the operator's own is served whatever variants models.yaml names:
its needs are read from its files, without loading them.
"""

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.config import (
    AdapterSpec,
    AuxiliaryModelSpec,
    ChatModelSpec,
    Config,
    ImageModelSpec,
    ModelSpec,
    PoolingModelSpec,
    SpeechModelSpec,
)
from engine.config.models import ChatEngineSpec, SpeculativeSpec, VariantSpec
from engine.errors import LoadError
from engine.files import read_record, write_record
from engine.placement.hardware import GIB, Hardware
from engine.placement.types import CPU_CACHE_GIB, Device, KvCache, Need
from engine.weights.layouts import LoraAdapter, room_bytes
from engine.weights.manifest import is_complete

FILE_NAME = "footprints.json"
DEFAULT_CONTEXT = 8192

_log = logging.getLogger("hearth.footprints")

# Left free on every device: what the driver, a display and fragmentation take.
_GPU_MARGIN, _GPU_MARGIN_LEAST = 0.05, GIB // 2
_RAM_MARGIN, _RAM_MARGIN_LEAST = 0.10, 2 * GIB
# Of memory that GPU and CPU share, the part that counts as RAM.
_RAM_OF_SHARED = 0.25
# What other programs take of RAM changes every second: it is rounded up to eighths of the machine, so that the plan
# stays the same.
_RAM_STEPS, _RAM_STEP_LEAST, _RAM_STEP_MOST = 8, GIB, 16 * GIB
# A demo with its libraries: in RAM 0.6 to 0.7 GiB, measured; on a GPU mostly CUDA's context.
_DEMO_GIB = {"gpu": 1.25, "ram": 0.75}
# Of a folder of the operator's own.
_SHORTEST_CONTEXT = 4096
_CACHE_BYTES = 2  # a number of the KV cache, in bfloat16
_TABLE_BYTES = 10  # for each position and dimension of a head: cosines and sines in 32 bits, and their inputs
# Families that share a cache between layers, compress it, or have heads of several sizes.
_OTHERS = ("kv_lora_rank", "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads")
_KINDS = {"full_attention", "sliding_attention", "linear_attention"}
_LICENCE = "see its model card"
# A measurement outside of these factors of the stated size is wrong: something else took or freed memory meanwhile.
_PLAUSIBLE = (0.4, 2.5)


class _Measured(msgspec.Struct, frozen=True):
    bytes: int


class Footprints(msgspec.Struct, frozen=True):
    """What models took when they were loaded, kept in a small JSON file for the next plan.

    Bytes on one device without the KV cache, by variant, split and device. Immutable: `with_` makes the next one.
    """

    footprints: dict[str, _Measured] = {}

    @classmethod
    def read(cls, data_dir: Path) -> Self:
        """Read the file; without one that can be read, return no footprints."""
        return read_record(data_dir / FILE_NAME, cls, "plans use the stated sizes")

    def of(self, variant: VariantSpec, split: int, device: str) -> int | None:
        """Return bytes on each of `split` devices of that name that the variant is split over; None: not known."""
        measured = self.footprints.get(_key(variant, split, device))
        return None if measured is None else measured.bytes

    def with_(self, variant: VariantSpec, split: int, device: str, used_bytes: int) -> Self:
        """Return a copy with one more measurement, unless it is implausible for the stated size."""
        stated = (variant.resident_gib or variant.weights_gib) * GIB / max(1, split)
        low, high = (factor * stated for factor in _PLAUSIBLE)
        if not low <= used_bytes <= high + 2 * GIB:
            _log.warning("%s took %d bytes, which cannot be right; not kept.", variant.id, used_bytes)
            return self
        return type(self)(self.footprints | {_key(variant, split, device): _Measured(used_bytes)})

    def write(self, data_dir: Path) -> None:
        write_record(data_dir / FILE_NAME, self, "the next plan uses the stated sizes")


def _key(variant: VariantSpec, split: int, device: str) -> str:
    # Revisions and number formats differ in size
    parts = (variant.id, variant.revision or "-", variant.dtype, variant.offload or "-", f"{split}x", device)
    return " | ".join(parts)


def devices_of(hardware: Hardware) -> tuple[Device, ...]:
    """Return the GPUs, then RAM."""
    gpus = []
    for gpu in hardware.gpus:
        total, capability = gpu.total_bytes, gpu.compute_capability
        margin = max(_GPU_MARGIN_LEAST, int((_RAM_OF_SHARED if hardware.shared_memory else _GPU_MARGIN) * total))
        gpus.append(Device(gpu.index, gpu.name, total, gpu.foreign_bytes, margin, capability, gpu.ours_bytes))
    if hardware.ram_for_models_bytes is not None:
        return (*gpus, Device(None, "RAM", hardware.ram_for_models_bytes, 0, 0))
    if hardware.shared_memory:
        return (*gpus, Device(None, "RAM", int(_RAM_OF_SHARED * hardware.ram_bytes), 0, _RAM_MARGIN_LEAST))
    taken = in_steps(hardware.ram_bytes - hardware.ram_available_bytes - hardware.ram_ours_bytes, hardware.ram_bytes)
    margin = max(_RAM_MARGIN_LEAST, int(_RAM_MARGIN * hardware.ram_bytes))
    return (*gpus, Device(None, "RAM", hardware.ram_bytes, taken, margin, ours_bytes=hardware.ram_ours_bytes))


def in_steps(taken_bytes: int, ram_bytes: int) -> int:
    """Return what others take of RAM, rounded up to the steps of the plan."""
    step = min(_RAM_STEP_MOST, max(_RAM_STEP_LEAST, ram_bytes // _RAM_STEPS))
    return -(-max(0, taken_bytes) // step) * step


def needs_of(
    spec: ModelSpec, variant: VariantSpec, devices: Sequence[Device], footprints: Footprints
) -> tuple[Need, ...]:
    """Return what a variant needs, for each number of GPUs it can be split over; empty if it cannot run here."""
    gpus = [device for device in devices if device.index is not None]
    if isinstance(spec, SpeechModelSpec) or (not gpus and variant.runs_on != "gpu"):
        return (_need(spec, variant, 0, {"RAM"}, footprints),)
    if not gpus or variant.runs_on == "cpu":
        return ()
    splits = variant.tensor_parallel_sizes if isinstance(spec, ChatModelSpec) else (1,)
    given = explicit(spec, "tensor_parallel_size")
    splits = (given,) if isinstance(given, int) else splits
    names = {gpu.name for gpu in gpus}
    size = max(gpu.total_bytes for gpu in gpus)
    fitting = [split for split in sorted(set(splits)) if split <= len(gpus)]
    return tuple(_need(spec, variant, split, names, footprints, gpu_bytes=size) for split in fitting)


def demo_need(spec: ModelSpec, devices: Sequence[Device]) -> Need:
    """Return the needs of a model's demo."""
    on_gpu = len(devices) > 1 and not isinstance(spec, SpeechModelSpec)
    size = _DEMO_GIB["gpu" if on_gpu else "ram"]
    demo = VariantSpec.model_validate({"folder": "demo", "licence": "Apache-2.0", "weights_gib": size})
    return Need(demo, split=1 if on_gpu else 0, weights_bytes=int(size * GIB), activations_bytes=0)


def explicit(spec: ModelSpec, key: str) -> object | None:
    """Return the value of a key under `engine` of a chat model; None if models.yaml leaves it to the plan."""
    said = isinstance(spec, ChatModelSpec) and key in spec.engine.model_fields_set
    return getattr(spec.engine, key) if said else None


def _need(  # noqa: PLR0913  # each is a part of the size
    spec: ModelSpec, variant: VariantSpec, split: int, names: set[str], footprints: Footprints, *, gpu_bytes: int = 0
) -> Need:
    """Return what a variant needs of each of `split` GPUs of these names (0: RAM). `gpu_bytes`: the largest GPU's."""
    known = [footprints.of(variant, split, name) for name in names]
    measured = [used for used in known if used is not None]
    is_measured = len(measured) == len(known)
    resident_gib = variant.resident_gib if split else None
    stated_gib = (resident_gib or variant.weights_gib) / max(1, split)
    cache, context, longest, fixed_gib = None, None, 0, None
    if isinstance(spec, ChatModelSpec):
        context = spec.engine.context_length or variant.context_length or DEFAULT_CONTEXT
        if spec.engine.context_length is None and spec.prefer == "context":
            longest = variant.max_context_length or 0
        cache = _cache(variant, split, gpu_bytes, spec.engine)
        fixed_gib = spec.engine.kv_cache_gib
        if not split and variant.id == spec.weights:  # on a CPU such a folder's context is what its cache has room for
            fixed_gib = fixed_gib or CPU_CACHE_GIB
            if cache is not None and spec.engine.context_length is None:
                context = cache.longest(int(fixed_gib * GIB), variant.max_context_length or context) or context
    elif isinstance(spec, AuxiliaryModelSpec) and variant.kv_kib_per_token:  # it has a decoder
        said = spec.engine.max_input_tokens if isinstance(spec, PoolingModelSpec) else None
        tokens = variant.chats * (said or variant.context_length or DEFAULT_CONTEXT)
        fixed_gib = spec.engine.kv_cache_gib or tokens * variant.kv_kib_per_token / 2**20
    share = explicit(spec, "gpu_memory_utilization") if split else None
    need = Need(
        variant,
        split,
        weights_bytes=max(measured) if is_measured else int(stated_gib * GIB),
        activations_bytes=int(variant.activations_gib * GIB),
        cache=cache,
        ram_bytes=0 if resident_gib is None else int(variant.weights_gib * GIB),
        context_length=context,
        longest_context=0 if isinstance(share, float) else longest,  # vLLM takes what the share leaves, maybe less
        sequences=spec.engine.max_num_seqs if isinstance(spec, ChatModelSpec) else 0,
        share=share if isinstance(share, float) else None,
        fixed_kv=fixed_gib is not None,
        measured=is_measured,
    )
    if fixed_gib is not None:
        return replace(need, kv_bytes=int(fixed_gib * GIB))
    if cache is None or context is None:
        return need
    return replace(need, kv_bytes=max(need.one_chat_bytes, cache.bytes_of(variant.chats, context)))


def _cache(variant: VariantSpec, split: int, gpu_bytes: int, engine: ChatEngineSpec) -> KvCache | None:
    """Return how a variant's KV cache is divided on each of `split` GPUs (0: in RAM); None if its size is not known.

    Its numbers may have 8 bits, but not those of states of layers with linear attention.
    """
    parts, halved = max(1, split), engine.kv_cache_dtype != "auto"
    token_bytes = int(variant.kv_kib_per_token * (512 if halved else 1024) / min(parts, variant.kv_heads or parts))
    if token_bytes == 0:
        return None
    return KvCache.of(
        token_bytes,
        groups=variant.groups,
        window=variant.sliding_window,
        state_bytes=int(variant.state_mib_per_chat * (1 << 20) / parts),
        gpu_bytes=gpu_bytes if split else 0,
        speculative=engine.speculative,
    )


def own_folders(config: Config, weights_dir: Path) -> dict[str, tuple[VariantSpec, ...]]:
    """Return each folder that models.yaml names under `weights` and that exists, as variants, by model or adapter.

    Nothing is raised: a folder whose size cannot be read gets no variants. Folders of voices are left out: they have
    many models, and the entry's variants say what they take.
    """
    folders = [(spec, weights_dir / spec.weights) for spec in _without_voices(config)]
    found = {spec.id: _read_folder(spec, folder) for spec, folder in folders if folder.is_dir()}
    for model in config.models:
        found |= _read_adapters(config.adapters_of(model), weights_dir)
    return found


def _read_adapters(specs: Sequence[AdapterSpec], weights_dir: Path) -> dict[str, tuple[VariantSpec, ...]]:
    """Return the adapters of one model that can be read, each with an equal part of the room for all."""
    read = {}
    for spec in specs:
        with contextlib.suppress(LoadError):
            read[spec.id] = LoraAdapter.read(weights_dir / spec.weights)
    size_gib = room_bytes(read.values()) / GIB / max(1, len(read))
    return {
        name: (VariantSpec.model_validate({"folder": name, "licence": _LICENCE, "weights_gib": size_gib}),)
        for name in read
    }


def variants_here(config: Config, weights_dir: Path) -> frozenset[str]:
    """Return the folders of all variants that are complete on the disk, but for voices, which are used side by side."""
    variants = (variant for spec in _without_voices(config) for variant in spec.variants)
    return frozenset(variant.id for variant in variants if is_complete(weights_dir / variant.id))


def _without_voices(config: Config) -> list[ModelSpec]:
    return [spec for spec in config.models.values() if not isinstance(spec, SpeechModelSpec)]


def _read_folder(spec: ModelSpec, folder: Path) -> tuple[VariantSpec, ...]:
    try:
        size_gib = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / GIB
        if isinstance(spec, ImageModelSpec):
            shape: dict[str, Any] = {"activations_gib": 3.0}
        elif isinstance(spec, AuxiliaryModelSpec):
            shape = {"activations_gib": 1.0}
        else:
            shape = _chat_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        common = {"folder": spec.weights, "licence": _LICENCE, "weights_gib": size_gib, "runs_on": "any"}
        return (VariantSpec.model_validate({**common, **shape}),) if size_gib > 0 else ()
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return ()


def _chat_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return context, KV cache and splits from a Hugging Face config.json."""
    found = ContextNeeds.of(config)
    return {
        "context_length": min(_SHORTEST_CONTEXT, found.positions),
        "max_context_length": found.positions,
        "kv_kib_per_token": found.token_bytes / 1024,
        "kv_groups": found.groups,
        "sliding_window": found.window,
        "state_mib_per_chat": found.state_bytes / (1 << 20),
        "kv_heads": found.kv_heads,
        "chats": 1,
        "activations_gib": 3.0 if "vision_config" in config else 2.25,
        "tensor_parallel_sizes": [split for split in (1, 2, 4, 8) if found.heads % split == 0],
    }


@dataclass(frozen=True, slots=True)
class ContextNeeds:
    """The memory of a context, by a chat model's config.json; KV cache in 16 bits, before it is split over GPUs."""

    positions: int
    """The most tokens that the model was made for."""
    heads: int
    kv_heads: int
    token_bytes: int
    """Of KV cache, for each token in the layers of one group."""
    groups: int
    """Of the KV cache."""
    window: int | None
    """Tokens that layers with a sliding window look back."""
    state_bytes: int
    """Of KV cache, for the states of a conversation in all layers with linear attention."""
    tables_bytes: int
    """While vLLM computes its tables of positions: for all `positions`, whatever context is served."""
    is_exact: bool
    """False: the family's cache is smaller than these numbers say, or different."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read a model's config.json; None if it does not say enough."""
        try:
            return cls.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a configuration. Raises `KeyError`, `TypeError` or `ValueError` for one of another form."""
        text = config.get("text_config") or config
        layers = int(text.get("num_hidden_layers") or text["n_layer"])  # GPT-2's name for it
        heads = int(text.get("num_attention_heads") or text["n_head"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        head_size = int(text.get("head_dim") or (text.get("hidden_size") or text["n_embd"]) // heads)
        positions = int(text.get("max_position_embeddings") or text["n_positions"])
        kinds = Counter(text.get("layer_types") or _kinds(text, layers))
        full, sliding, linear = (kinds[f"{name}_attention"] for name in ("full", "sliding", "linear"))
        state = _state_bytes(text) if linear else 0
        kept = [count for count in (full, sliding, linear if state else 0) if count] or [layers]
        # Layers of a group: as many as there are of the rarest kind, or of the other kind if that has hardly more
        in_group = max(kept) if max(kept) < 1.5 * min(kept) else full or min(kept)
        beside = sum(-(-count // in_group) for count in (sliding, linear if state else 0))
        per_token = 2 * kv_heads * head_size * _CACHE_BYTES  # and layer
        return cls(
            positions=positions,
            heads=heads,
            kv_heads=kv_heads,
            token_bytes=in_group * per_token,
            groups=max(1, beside + bool(full)),
            window=int(text.get("sliding_window") or 0) or None if sliding else None,
            state_bytes=-(-linear // in_group) * in_group * state,
            tables_bytes=positions * head_size * _TABLE_BYTES,
            is_exact=set(kinds) <= _KINDS and bool(state) == bool(linear) and not any(key in text for key in _OTHERS),
        )

    def cache(
        self, split: int, gpu_bytes: int, *, wide: float = 1, speculative: SpeculativeSpec | None = None
    ) -> KvCache:
        """Return how the cache is divided on each of `split` GPUs of that size (0: in RAM).

        `wide`: 2 for numbers of 32 bits, 0.5 for 8.
        """
        return KvCache.of(
            int(self.token_bytes * wide) // min(split, self.kv_heads),
            groups=self.groups,
            window=self.window,
            state_bytes=self.state_bytes // split,
            gpu_bytes=gpu_bytes,
            speculative=speculative,
        )


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of layers; if the configuration lists none, every `interval`th has full attention."""
    interval = int(text.get("full_attention_interval") or ("linear_num_value_heads" in text) * 4 or 1)
    return ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(layers)]


def _state_bytes(text: Mapping[str, Any]) -> int:
    """Return the state of a gated delta net (Qwen3-Next and later) in one layer: 0 for other kinds of states."""
    if "linear_num_value_heads" not in text:
        return 0
    keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    values = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
    convolution = (2 * keys + values) * (int(text["linear_conv_kernel_dim"]) - 1) * _CACHE_BYTES
    wide = 4 if text.get("mamba_ssm_dtype") == "float32" else _CACHE_BYTES
    return convolution + values * int(text["linear_key_head_dim"]) * wide

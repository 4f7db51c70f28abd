"""Which weights are on the disk, and what a folder that somebody put there needs, read off its files; it loads nothing.

Such a folder is served whatever variants models.yaml names. How much context fits is left to the plan: the folder
is offered with its full context and with shorter ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.config.models import VariantSpec
from engine.placement.hardware import GIB
from engine.weights import is_complete

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.config import Config, ModelSpec

_SHORTEST_CONTEXT = 4096
_CACHE_BYTES = 2  # a number of the KV cache, in bfloat16
_LICENCE = "see its model card"


def own_folders(config: Config, weights_dir: Path) -> dict[str, tuple[VariantSpec, ...]]:
    """Return what the folders are that models.yaml names under `weights` and that are there, by model.

    Nothing is raised: a folder that does not say how large it is gets no variants. Voices are not among them: their
    folder holds many models, of which the entry's variants stand for what they take.
    """
    found: dict[str, tuple[VariantSpec, ...]] = {}
    for spec in config.models.values():
        folder = weights_dir / spec.weights
        if not isinstance(spec, SpeechModelSpec) and folder.is_dir():
            found[spec.id] = _variants(spec, folder)
    return found


def variants_here(config: Config, weights_dir: Path) -> frozenset[str]:
    """Return the folders of all variants that are on the disk, complete; voices aside, which are used side by side."""
    return frozenset(
        variant.id
        for spec in config.models.values()
        if not isinstance(spec, SpeechModelSpec)
        for variant in spec.variants
        if is_complete(weights_dir / variant.id)
    )


def _variants(spec: ModelSpec, folder: Path) -> tuple[VariantSpec, ...]:
    try:
        size_gib = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / GIB
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if _chats(spec) else {}
    except (OSError, ValueError):
        return ()
    if size_gib <= 0:
        return ()
    common: dict[str, Any] = {"folder": spec.weights, "licence": _LICENCE, "weights_gib": size_gib, "runs_on": "any"}
    if isinstance(spec, ImageModelSpec):
        return (VariantSpec.model_validate({**common, "activations_gib": 3.0}),)
    try:
        return tuple(VariantSpec.model_validate({**common, **shape}) for shape in _shapes(config))
    except (AttributeError, KeyError, TypeError, ValueError):
        return ()


def _chats(spec: ModelSpec) -> bool:
    return isinstance(spec, ChatModelSpec)


def _shapes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """From a Hugging Face config.json: context, KV cache and splits, once for each context that is worth trying."""
    text = config.get("text_config") or config
    layers = text["num_hidden_layers"]
    kinds = text.get("layer_types") or ["full_attention"] * layers
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    head_size = text.get("head_dim") or text["hidden_size"] // heads
    per_token = 2 * sum(kind == "full_attention" for kind in kinds) * kv_heads * head_size * _CACHE_BYTES
    shape = {
        "kv_kib_per_token": per_token / 1024,
        "kv_heads": kv_heads,
        "chats": 1,
        "activations_gib": 2.5 if "vision_config" in config else 1.5,
        "tensor_parallel_sizes": [split for split in (1, 2, 4, 8) if heads % split == 0],
    }
    contexts: list[int] = []
    context = int(text["max_position_embeddings"])
    while not contexts or context >= _SHORTEST_CONTEXT:
        contexts.append(context)
        context //= 2
    return [{**shape, "context_length": context} for context in contexts]

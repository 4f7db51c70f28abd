"""Models without training, as scripts/prove-gpu makes them: their shapes are those of the shipped variants."""

import json
from functools import cache
from pathlib import Path

import pytest
from plan_parts import shipped
from test_kv_blocks import CONFIGS, SHIPPED

from engine.config import ChatModelSpec
from engine.placement.needs import ContextNeeds
from engine.weights.manifest import is_complete
from engine.weights.safety import check_chat_folder

VARIANTS = {
    variant.id: variant
    for spec in shipped().models.values()
    if isinstance(spec, ChatModelSpec)
    for variant in spec.variants
}
# How many bytes a number takes, on average: norms, embeddings and what is left out keep 16 bits.
BYTES = {None: (2.0, 2.0), "fp8": (1.0, 1.6), "mxfp4": (0.5, 0.68), "nvfp4": (0.5, 0.75), "awq": (0.5, 0.85)}


@cache
def parameters(base: str) -> tuple[int, int]:
    """Return how many numbers a model of this shape has, and how many its words take."""
    import torch
    import transformers
    from proof.random_chat import architecture, shape

    with torch.device("meta"):
        config = shape(base)
        model = getattr(transformers, architecture(config))(config)
    return sum(one.numel() for one in model.parameters()), model.get_input_embeddings().weight.numel()


def test_every_shipped_variant_has_a_shape_that_fits_its_published_size():
    pytest.importorskip("torch")
    from proof.random_chat import base_of

    for name, variant in VARIANTS.items():
        numbers, words = parameters(base_of(name))
        least, most = (numbers * each / 2**30 for each in BYTES[variant.quantization])
        saved_twice = 2 * words / 2**30
        assert 0.97 * least <= variant.weights_gib <= 1.03 * most + saved_twice, (name, numbers)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_its_kv_cache_is_the_published_one(name: str):
    pytest.importorskip("torch")
    from proof.random_chat import shape

    ours = ContextNeeds.of(json.loads(shape(name).to_json_string(use_diff=False)))
    theirs = ContextNeeds.of(CONFIGS[SHIPPED[name]])
    assert (ours.token_bytes, ours.groups, ours.state_bytes) == (theirs.token_bytes, theirs.groups, theirs.state_bytes)


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3.5-2b"])
def test_a_small_one_is_taken_for_a_fetched_one(name: str, tmp_path: Path):
    pytest.importorskip("torch")
    from proof.random_chat import write

    write(VARIANTS[name], tmp_path / name, small=True)
    assert is_complete(tmp_path / name)
    check_chat_folder(tmp_path / name)

"""scripts/prove-gpu: a rehearsal with models of both kinds, a report that says which step failed, untrained models."""

import asyncio
import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from plan_parts import shipped
from proof import gpu
from proof.report import Proof, Skipped, as_markdown, tokens_per_second
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


def test_a_step_that_fails_is_told_and_the_others_go_on(tmp_path: Path):
    async def works() -> dict[str, int]:
        return {"seen": 3}

    async def fails() -> dict[str, int]:
        raise ValueError("no | such\nthing")

    async def has_nothing() -> dict[str, int]:
        raise Skipped("one GPU only")

    async def hangs() -> dict[str, int]:
        await asyncio.Event().wait()
        return {}

    proof = Proof("1 GPU", "590", datetime.now(UTC).isoformat(), rehearsal=False, out=tmp_path)

    async def each() -> list[bool]:
        steps = {"first": fails, "second": works, "third": has_nothing}
        passed = [await proof.try_step(name, work) for name, work in steps.items()]
        return [*passed, await proof.try_step("fourth", hangs, limit_seconds=0.01)]

    assert asyncio.run(each()) == [False, True, False, False]
    assert proof.failed == 2
    text = as_markdown(proof)
    assert "Driver 590. Weights: fetched. 2 of 4 steps failed, 1 were skipped." in text
    assert "| first | FAILED |" in text
    assert "ValueError: no / such thing |" in text
    assert "seen: 3 |" in text
    assert "| third | skipped |" in text
    assert "not done after 0 s |" in text
    assert (tmp_path / "proof.md").read_text() == text, "written after each step"
    assert [step["passed"] for step in json.loads((tmp_path / "proof.json").read_text())["steps"]][:2] == [False, True]


def test_the_limit_counts_the_experts_that_a_step_reads():
    dense = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512}
    assert tokens_per_second(dense, 1e9, 4, 2e9) == 8.0
    experts = {"text_config": dense | {"num_experts": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 512}}
    alone, many = (tokens_per_second(experts, 1e9, streams, 2e9) for streams in (1, 256))
    assert 20 * 2.0 < alone < 64 * 2.0, "a sixty-fourth of the experts, and what is beside them"
    assert 256 * 2.0 < many < 1.05 * 256 * 2.0, "nearly all experts"


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


@pytest.mark.engine
def test_images_are_measured_without_a_server(tmp_path: Path):
    from proof import images

    assert images.main(["--small", "--profiles", "sdxl", "--out", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / "proof.json").read_text())["steps"]
    assert [step["name"] for step in steps[2:4]] == ["sdxl: 1 x 512 at once", "sdxl: 2 x 512 at once"]
    assert all(step["figures"]["seconds_per_image"] > 0 for step in steps[2:])


@pytest.mark.engine
@pytest.mark.rounds
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weights", ["demos", "random"])
def test_a_rehearsal_on_this_machine_passes_all_steps(tmp_path: Path, weights: str):
    out = tmp_path / "proof"
    options = ["--out", str(out), "--weights-dir", str(tmp_path / "none"), "--streams", "16"]
    code = gpu.main([*options, *(["--random"] if weights == "random" else [])])
    proof = json.loads((out / "proof.json").read_text())
    assert [(step["name"], step["problem"]) for step in proof["steps"] if not step["passed"]] == []
    assert code == 0
    speeds = [
        step["figures"]["tokens_per_second"] for step in proof["steps"] if re.search(r"\d streams$", step["name"])
    ]
    assert len(speeds) == 4
    assert min(speeds) > 0
    names = {step["name"] for step in proof["steps"] if not step["skipped"]}
    assert {"service-pro: a picture of 4096 x 4096", "service-pro: a forced call"} <= names
    assert {"service-image: 4 x 1024", "sdxl: 4 x 1024 at once", "service-embedding: 256 texts"} <= names
    assert "every endpoint of every model" in names
    assert {"service-plus: beside `vllm serve`", "kill -9 of a chat engine while it streams"} <= names
    assert (out / "proof.md").read_text().startswith("# Proof of ")
    assert (out / "logs" / "hearth.log").is_file()
    beside = next(step["figures"] for step in proof["steps"] if step["name"] == "service-plus: beside `vllm serve`")
    assert len(beside["hearth_of_serve_16"]) == 2
    assert {"hearth.log", "serve.log"} <= {log.name for log in (out / "logs" / "service-plus").iterdir()}

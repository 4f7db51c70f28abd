"""Folders of LoRA adapters: what is read off them, and every reason for which one is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_parts import LAYERS, SIZES, make_adapter
from plan_parts import config_of, model, variant

from engine.config import AdapterSpec, Config
from engine.demo import weights_dir
from engine.errors import LoadError
from engine.placement.hardware import GIB, imagined
from engine.placement.needs import own_folders
from engine.placement.plan import plan
from engine.placement.types import Plan
from engine.weights.layouts import LoraAdapter, room_bytes

NUMBERS = LAYERS * sum(sum(size) for size in SIZES.values())


def test_an_adapter_of_the_base_is_read(tmp_path: Path):
    found = LoraAdapter.read(make_adapter(tmp_path / "legal"))
    found.check_base(weights_dir("chat"))
    assert (found.rank, found.made_for, len(found.modules)) == (4, "office/demo", LAYERS * len(SIZES))
    assert found.targets == {"q_proj", "v_proj", "down_proj"}


def test_the_room_for_adapters_is_that_of_vllms_places(tmp_path: Path):
    small = LoraAdapter.read(make_adapter(tmp_path / "a", sizes={"self_attn.q_proj": SIZES["self_attn.q_proj"]}))
    large = LoraAdapter.read(make_adapter(tmp_path / "b", rank=9))
    assert room_bytes([small]) == 8 * LAYERS * (128 + 256) * 2
    assert room_bytes([small, large]) == 2 * 16 * NUMBERS * 2
    assert room_bytes([]) == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"peft_type": "IA3"}, "`peft_type` must be LORA"),
        ({"r": 0}, "no rank `r` from 1 to 512"),
        ({"r": True}, "no rank"),
        ({"rank_pattern": {"q_proj": 1024}}, "no rank"),
        ({"rank_pattern": [1]}, "no rank"),
        ({"use_dora": True}, "uses use_dora"),
        ({"bias": "all", "modules_to_save": ["lm_head"]}, "uses bias, modules_to_save"),
    ],
)
def test_what_vllm_cannot_do_is_named(tmp_path: Path, changed: dict[str, Any], why: str):
    with pytest.raises(LoadError, match=why):
        LoraAdapter.read(make_adapter(tmp_path / "legal", **changed))


def test_other_files_are_refused(tmp_path: Path):
    with pytest.raises(LoadError, match="no folder 'legal'"):
        LoraAdapter.read(tmp_path / "legal")
    folder = make_adapter(tmp_path / "legal")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(LoadError, match="cut off or damaged"):
        LoraAdapter.read(folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(LoadError, match="can run code and are refused"):
        LoraAdapter.read(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(LoadError, match="is not of a LoRA adapter"):
        LoraAdapter.read(folder)


def test_a_model_is_no_adapter(tmp_path: Path):
    folder = make_adapter(tmp_path / "legal")
    (folder / "adapter_model.safetensors").write_bytes((weights_dir("chat") / "model.safetensors").read_bytes())
    with pytest.raises(LoadError, match="no pair of matrices"):
        LoraAdapter.read(folder)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"self_attn.q_proj": (64, 256)}, "self_attn.q_proj is 64 x 256 and the base's 128 x 256; it says that it was"),
        ({"self_attn.qkv_proj": (128, 256)}, "changes modules that its base does not have; it says that it was made"),
    ],
)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, sizes: dict[str, tuple[int, int]], why: str):
    with pytest.raises(LoadError, match=why):
        LoraAdapter.read(make_adapter(tmp_path / "legal", sizes=sizes)).check_base(weights_dir("chat"))


def adapted(names: tuple[str, ...]) -> Config:
    fields = {"task": "adapter", "tier": "standard", "base": "plus"}
    adapters = {name: AdapterSpec.model_validate({**fields, "id": name, "weights": name}) for name in names}
    config = config_of(model("plus", variant("big", 4, kv_kib_per_token=100)))
    return Config(config.path, config.models, config.tiers, adapters)


def test_the_plan_keeps_room_for_adapters(tmp_path: Path):
    width = 1 << 16
    for name in ("legal", "medical"):
        make_adapter(tmp_path / name, rank=64, sizes={"mlp.down_proj": (width, width)})
    room = 2 * 64 * LAYERS * 2 * width * 2
    config = adapted(("legal", "medical", "absent"))
    alone, beside = (plan(config, imagined("1x8"), folders=each) for each in ({}, own_folders(config, tmp_path)))
    assert isinstance(alone, Plan)
    assert isinstance(beside, Plan)
    before, (after,) = alone.models[0], beside.models
    assert before.need is not None
    assert after.need is not None
    assert after.need.adapters_bytes == pytest.approx(room, abs=4)
    assert after.kv_bytes < before.kv_bytes
    assert after.device_bytes == after.need.weights_bytes + after.need.activations_bytes + room + after.kv_bytes
    assert after.device_bytes <= 8 * GIB
    assert f"{room / GIB:.1f} GiB for its adapters" in after.why


def test_the_configuration_names_bases_that_chat(tmp_path: Path):
    from engine.config import ConfigError, load_config

    file = tmp_path / "models.yaml"
    good = {
        "plus": {"task": "chat", "tier": "t", "capabilities": ["chat"], "weights": "plus"},
        "legal": {"task": "adapter", "tier": "t", "base": "plus", "weights": "legal", "aliases": ["law"]},
    }
    file.write_text(json.dumps({"models": good, "tiers": {"t": {"models": ["t"]}}}))
    config = load_config(file)
    assert (list(config.models), list(config.adapters)) == (["plus"], ["legal"])
    assert config.entry("law") == config.adapters["legal"]
    assert config.adapters_of("plus") == (config.adapters["legal"],)
    for base in ("legal", "pls"):
        wrong = {**good, "legal": {**good["legal"], "base": base}}
        file.write_text(json.dumps({"models": wrong, "tiers": {"t": {"models": ["t"]}}}))
        with pytest.raises(ConfigError, match=f"models.legal.base: must be a chat model of this file, not `{base}`"):
            load_config(file)
    file.write_text(
        json.dumps({"models": {"legal": {**good["legal"], "engine": {}}}, "tiers": {"t": {"models": ["t"]}}})
    )
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(file)

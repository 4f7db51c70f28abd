"""Folders that leave something out on purpose: plain weights beside those of 16 bits, or a text encoder."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipelines import save

from engine import LoadError
from engine.backends.diffusers.service import load
from engine.config.models import profile_named
from engine.weights.safety import check_pipeline_folder, lacking, variant

DEMO = profile_named("demo")
SMALL_SHARDS = "40KB"


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("sdxl", tmp_path_factory.mktemp("pipelines") / "fp16", variant="fp16", max_shard_size=SMALL_SHARDS)


@pytest.fixture
def without_t5(folders: Callable[[str], Path]) -> Path:
    return folders("sd3_without_t5")


def plain(folder: Path, part: str) -> None:
    """Rename a component's files to what they are called without a variant."""
    for file in sorted((folder / part).glob("*.fp16*")):
        file.rename(file.with_name(re.sub(r"\.fp16", "", file.name)))
    for index in (folder / part).glob("*.index.json"):
        index.write_text(index.read_text().replace(".fp16", ""))


def test_weights_of_16_bits_alone_are_loaded_whole_and_in_shards(fp16: Path):
    assert {variant(fp16), variant(fp16.parent)} == {"fp16", None}
    assert list(fp16.glob("unet/*.fp16-00001-of-*.safetensors"))
    pipe = load(fp16, DEMO)
    assert type(pipe).__name__ == "StableDiffusionXLPipeline"
    assert {str(parameter.dtype) for parameter in pipe.unet.parameters()} == {"torch.float32"}


def test_one_component_of_16_bits_is_enough(fp16: Path, tmp_path: Path):
    folder = shutil.copytree(fp16, tmp_path / "mixed")
    for part in ("vae", "text_encoder", "text_encoder_2"):
        plain(folder, part)
    assert variant(folder) == "fp16"
    assert load(folder, DEMO).vae is not None


def test_where_both_are_there_the_plain_weights_are_taken(fp16: Path, tmp_path: Path):
    folder = shutil.copytree(fp16, tmp_path / "both")
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        plain(folder, part)
        for file in (fp16 / part).glob("*.fp16*.safetensors"):
            shutil.copy(file, folder / part)
    assert variant(folder) is None
    assert load(folder, DEMO).unet is not None


def test_an_index_of_a_variant_leads_to_safetensors_only(fp16: Path, tmp_path: Path):
    folder = shutil.copytree(fp16, tmp_path / "evil")
    [index] = (folder / "unet").glob("*.safetensors.index.fp16.json")
    index.write_text(json.dumps({"weight_map": {"a": "evil.bin"}}))
    with pytest.raises(LoadError, match="names files that are not safetensors"):
        check_pipeline_folder(folder)
    index.write_text(json.dumps({"weight_map": {"a": "model.fp16-00009-of-00009.safetensors"}}))
    with pytest.raises(LoadError, match="safetensors is missing"):
        check_pipeline_folder(folder)


def test_sd3_does_without_t5_where_its_index_says_so(without_t5: Path):
    assert lacking(without_t5) == ["text_encoder_3", "tokenizer_3"]
    pipe = load(without_t5, DEMO)
    assert (pipe.text_encoder_3, pipe.tokenizer_3) == (None, None)


@pytest.mark.parametrize("part", ["transformer", "vae", "tokenizer", "text_encoder"])
def test_nothing_else_may_be_left_out(without_t5: Path, tmp_path: Path, part: str):
    folder = shutil.copytree(without_t5, tmp_path / "less")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {part: [None, None]}))
    with pytest.raises(LoadError, match="less cannot be loaded as a StableDiffusion3Pipeline"):
        load(folder, DEMO)


def test_a_text_encoder_needs_its_tokenizer(folders: Callable[[str], Path], tmp_path: Path):
    folder = shutil.copytree(folders("sd3"), tmp_path / "sd3")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"tokenizer_3": [None, None]}))
    assert lacking(folder) == []
    with pytest.raises(LoadError, match="sd3 cannot be loaded"):
        load(folder, DEMO)

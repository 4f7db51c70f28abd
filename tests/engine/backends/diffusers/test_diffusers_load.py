"""The folder of a pipeline is checked before anything of it is loaded. What is missing or unsafe is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LoadError
from engine.backends.diffusers.families import FAMILIES
from engine.backends.diffusers.service import load
from engine.config.models import profile_named
from engine.weights.safety import PIPELINES, check_pipeline_folder

DEMO = profile_named("demo")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(folders("z_image"), tmp_path / "model")


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def index(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "model_index.json", **changes)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes = b"") -> Callable[[Path], int]:
    return lambda folder: (folder / name).write_bytes(content)


def rename_weights(suffix: str) -> Callable[[Path], Path]:
    return lambda folder: (folder / WEIGHTS).rename((folder / WEIGHTS).with_suffix(suffix))


def cut_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def name_missing_shard(folder: Path) -> None:
    shards = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    write("text_encoder/model.safetensors.index.json", json.dumps(shards).encode())(folder)


def name_shard_outside(folder: Path) -> None:
    shards = {"weight_map": {"a": "../../secret.safetensors"}}
    write("text_encoder/model.safetensors.index.json", json.dumps(shards).encode())(folder)


def name_pickled_shard(folder: Path) -> None:
    """With a decoy beside it: diffusers would load what the index names."""
    shutil.copy(folder / WEIGHTS, folder / "transformer" / "decoy.safetensors")
    (folder / WEIGHTS).rename(folder / "transformer" / "evil.bin")
    shards = {"weight_map": {"a": "evil.bin"}}
    write(f"{WEIGHTS}.index.json", json.dumps(shards).encode())(folder)


def link_scheduler_outside(folder: Path) -> None:
    outside = folder.parent / "outside"
    (folder / "scheduler").rename(outside)
    (folder / "scheduler").symlink_to(outside)


def test_a_pipeline_in_order_is_loaded_in_full_precision_on_a_cpu(folder: Path):
    pipe = load(folder, DEMO)
    assert (type(pipe).__name__, pipe.device.type) == ("ZImagePipeline", "cpu")
    assert {str(parameter.dtype) for parameter in pipe.transformer.parameters()} == {"torch.float32"}


def test_with_tiling_a_large_image_is_decoded_in_tiles_also_where_the_vae_was_made_for_its_size(folder: Path):
    change_json(folder / "vae/config.json", sample_size=1024)
    vae = load(folder, profile_named("demo", {"vae_tiling": True})).vae
    decoded: list[int] = []
    vae.decoder.register_forward_hook(lambda _module, _latents, pixels: decoded.append(pixels.shape[-1]))
    with torch.inference_mode():
        assert vae.decode(torch.zeros(1, 16, 128, 128), return_dict=False)[0].shape[-2:] == (1024, 1024)
    assert max(decoded) == 512


def test_of_every_pipeline_that_is_loaded_something_is_known():
    assert tuple(FAMILIES) == PIPELINES


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (remove("model_index.json"), "has no model_index.json"),
        (write("model_index.json", b"[]"), "model_index.json is not a JSON object"),
        (index(_class_name="DiffusionPipeline"), "names the pipeline DiffusionPipeline, which is not supported"),
        (index(_class_name=["evil", "Pipeline"]), "which is not "),
        (index(vae=["evil", "AutoencoderKL"]), "takes the component vae from .*evil"),
        (index(vae=["diffusers", "../AutoencoderKL"]), "takes the component vae"),
        (index(vae=["diffusers"]), "takes the component vae"),
        (index(**{"../vae": ["diffusers", "AutoencoderKL"]}), "takes the component ../vae"),
        (index(more=["diffusers", "AutoencoderKL"]), "has no folder more"),
        (write("pipeline.py"), "pipeline.py is code"),
        (write("transformer/modeling.py"), "transformer/modeling.py is code"),
        (lambda folder: change_json(folder / "text_encoder/config.json", auto_map={}), "text_encoder/config.json has"),
        (
            lambda folder: change_json(folder / "tokenizer/tokenizer_config.json", auto_map={}),
            "tokenizer/tokenizer_con",
        ),
        (remove("transformer/config.json"), "transformer has no config.json"),
        (remove(WEIGHTS), "transformer has no .safetensors file. Finish"),
        (rename_weights(".bin"), "transformer contains diffusion_pytorch_model.bin and no .safetensors file"),
        (rename_weights(".ckpt"), "pickle formats can run code"),
        (cut_weights, "transformer/diffusion_pytorch_model.safetensors is cut off or damaged"),
        (name_missing_shard, "text_encoder/model-00002-of-00002.safetensors is missing"),
        (name_shard_outside, "names files that are not safetensors"),
        (name_pickled_shard, "names files that are not safetensors"),
        (link_scheduler_outside, "scheduler is a link"),
    ],
)
def test_a_folder_that_is_unsafe_or_incomplete_is_refused(
    folder: Path, damage: Callable[[Path], object], complaint: str
):
    check_pipeline_folder(folder)
    damage(folder)
    with pytest.raises(LoadError, match=complaint) as caught:
        load(folder, DEMO)
    assert str(folder.parent) not in caught.value.message


def test_what_diffusers_cannot_read_is_the_operators_matter_too(folder: Path):
    change_json(folder / "transformer/config.json", dim=64)
    with pytest.raises(LoadError, match="model cannot be loaded as a ZImagePipeline"):
        load(folder, DEMO)

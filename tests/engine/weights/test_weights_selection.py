"""What of a repository is fetched, and which repositories are refused before anything large is."""

import dataclasses
import json
from pathlib import Path

import pytest
from hub_server import HubServer
from weight_parts import FILES, NAME, REPOSITORY, SHARD, pull, refusal, safetensors, wanted

from engine.demo import weights_dir
from engine.errors import LoadError
from engine.weights.download import Wanted
from engine.weights.manifest import MANIFEST, is_complete
from engine.weights.safety import check_loadable


def test_only_what_is_loaded_is_fetched(hub: HubServer, tmp_path: Path):
    files = hub.repositories[REPOSITORY].files
    files |= {
        "pytorch_model.bin": b"pickle",
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}',
        "modeling_own.py": b"import os",
        "consolidated.safetensors": safetensors(10),
        "original/params.json": b"{}",
        "onnx/model.onnx": b"onnx",
        "model.fp16.safetensors": safetensors(10),
        ".gitattributes": b"",
        "LICENSE": b"Apache-2.0",
        "spiece.model": b"vocabulary",
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/rag.jinja": b"{{ documents }}",
        "figures/graph.png": b"png",
    }
    manifest = pull(tmp_path, wanted(hub))
    more = {"LICENSE", "spiece.model", "chat_template.jinja", "additional_chat_templates/rag.jinja"}
    assert {file.path for file in manifest.files} == set(FILES) | more


def test_of_a_pipeline_its_parts_are_fetched_and_nothing_twice(hub: HubServer, tmp_path: Path):
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "image_encoder": [None, None],
    }
    parts = {
        "model_index.json": json.dumps(index).encode(),
        "scheduler/scheduler_config.json": b"{}",
        "unet/config.json": b"{}",
        "unet/diffusion_pytorch_model.safetensors": safetensors(100),
    }
    others = {
        "unet/diffusion_pytorch_model.fp16.safetensors": safetensors(50),
        "unet/diffusion_pytorch_model.bin": b"pickle",
        "safety_checker/config.json": b"{}",
        "safety_checker/model.safetensors": safetensors(50),
        "sd_xl_base_1.0.safetensors": safetensors(200),
        "vae_1_0/config.json": b"{}",
    }
    hub.add("owner/pipeline", parts | others)
    manifest = pull(tmp_path, Wanted("owner/pipeline", "pipeline", endpoint=hub.endpoint))
    assert {file.path for file in manifest.files} == set(parts)
    there = {path.relative_to(tmp_path / "pipeline").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == set(parts) | {MANIFEST}


@pytest.mark.parametrize("name", ["chat", "vision", "image"])
def test_of_a_real_model_everything_is_fetched_that_loading_needs(name: str, hub: HubServer, tmp_path: Path):
    demo = weights_dir(name)
    files = {path.relative_to(demo).as_posix(): path.read_bytes() for path in demo.rglob("*") if path.is_file()}
    hub.add("owner/real", files)
    manifest = pull(tmp_path, Wanted("owner/real", name, endpoint=hub.endpoint))
    assert {file.path for file in manifest.files} == set(files)
    check_loadable(tmp_path / name)


def test_of_weights_in_16_bits_only_one_set_is_fetched(hub: HubServer, tmp_path: Path):
    index = {"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    stem = "unet/diffusion_pytorch_model"
    listed = {"weight_map": {"a": "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"}}
    parts = {
        "model_index.json": json.dumps(index).encode(),
        "unet/config.json": b"{}",
        f"{stem}.fp16-00001-of-00001.safetensors": safetensors(100),
        f"{stem}.safetensors.index.fp16.json": json.dumps(listed).encode(),
    }
    hub.add("owner/pipeline", parts | {f"{stem}.non_ema.safetensors": safetensors(90)})
    manifest = pull(tmp_path, Wanted("owner/pipeline", "pipeline", endpoint=hub.endpoint))
    assert {file.path for file in manifest.files} == set(parts)


def test_a_voice_is_fetched_from_a_folder_of_a_repository(hub: HubServer, tmp_path: Path):
    voice = {"amy.onnx": b"onnx", "amy.onnx.json": b"{}", "MODEL_CARD": b"licence"}
    files = {f"en/amy/medium/{name}": content for name, content in voice.items()}
    hub.add("owner/voices", files | {"en/joe/medium/joe.onnx": b"o", "en/joe/medium/joe.onnx.json": b"{}"})
    asked = Wanted("owner/voices", "voices/amy", endpoint=hub.endpoint)
    assert "name one with --subfolder" in refusal(tmp_path, asked)
    manifest = pull(tmp_path, dataclasses.replace(asked, subfolder="en/amy/medium"))
    assert {file.path for file in manifest.files} == set(voice)
    assert is_complete(tmp_path / "voices" / "amy")


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a\\..\\x.json", "a/../../x.json", "a//b.json", "a\n.json", ""]
)
def test_a_list_with_a_path_that_leads_out_is_refused_before_anything_is_fetched(
    name: str, hub: HubServer, tmp_path: Path
):
    entry = {"rfilename": name, "size": 1, "blobId": "0" * 40}
    hub.repositories[REPOSITORY].listed = [entry]
    assert "outside of the model's folder" in refusal(tmp_path / "weights", wanted(hub))
    assert not hub.served_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_list_that_names_a_file_twice_or_without_hash_is_refused(hub: HubServer, tmp_path: Path):
    repository = hub.repositories[REPOSITORY]
    repository.listed = repository.siblings()[:1]
    assert "lists a file twice" in refusal(tmp_path, wanted(hub))
    repository.listed = []
    repository.without_hashes = True
    assert "does not say size and hash" in refusal(tmp_path, wanted(hub))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_a_model_with_code_is_refused_before_its_weights_are_fetched(name: str, hub: HubServer, tmp_path: Path):
    hub.repositories[REPOSITORY].files[name] = json.dumps({"auto_map": {"AutoModel": "own.Model"}}).encode()
    with pytest.raises(LoadError, match="auto_map"):
        pull(tmp_path, wanted(hub))
    assert SHARD not in hub.served_bytes
    assert not (tmp_path / NAME).exists()


def test_a_repository_of_pickles_is_refused(hub: HubServer, tmp_path: Path):
    hub.add("owner/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    message = refusal(tmp_path, Wanted("owner/pickles", NAME, endpoint=hub.endpoint))
    assert "pytorch_model.bin and no .safetensors" in message
    assert "pytorch_model.bin" not in hub.served_bytes


def test_weights_that_are_whole_but_no_safetensors_never_get_a_folder(hub: HubServer, tmp_path: Path):
    hub.repositories[REPOSITORY].files[SHARD] = b"not what it says" * 100
    with pytest.raises(LoadError, match="cut off or damaged"):
        pull(tmp_path, wanted(hub))
    assert not (tmp_path / NAME).exists()


def test_an_index_that_leads_out_is_refused(hub: HubServer, tmp_path: Path):
    index = json.dumps({"weight_map": {"a": "../evil.safetensors"}}).encode()
    hub.repositories[REPOSITORY].files["model.safetensors.index.json"] = index
    with pytest.raises(LoadError, match="names files"):
        pull(tmp_path, wanted(hub))

"""What a folder of an embedding model says about its vectors is followed, or refused; it is never guessed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.demo import weights_dir
from engine.errors import LoadError
from engine.weights.layouts import VectorLayout, check_pooling_folder, read_layout
from engine.weights.safety import chosen

KIND = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(weights_dir("embedding"), tmp_path / "model")


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def modules(*kinds: str) -> list[dict[str, Any]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [
        {"idx": at, "path": paths.get(kind, f"{at}_{kind}"), "type": f"{KIND}.{kind}"} for at, kind in enumerate(kinds)
    ]


def test_the_demo_is_a_folder_of_sentence_transformers(folder: Path):
    assert read_layout(folder, None) == VectorLayout("mean", normalised=True, prefixes={"": ""})
    assert check_pooling_folder(folder) == (512, "float16")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_each_way_of_pooling_is_found(folder: Path, config: dict[str, Any], pooling: str):
    write(folder, "1_Pooling/config.json", config)
    assert read_layout(folder, None).pooling == pooling


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode_mean_tokens": True, "include_prompt": False},
        {},
        [],
    ],
)
def test_another_way_of_pooling_is_refused(folder: Path, config: Any):
    write(folder, "1_Pooling/config.json", config)
    with pytest.raises(LoadError, match=r"1_Pooling/config\.json"):
        read_layout(folder, None)


def test_without_normalize_vectors_keep_their_length(folder: Path):
    write(folder, "modules.json", modules("Transformer", "Pooling"))
    assert not read_layout(folder, None).normalised


@pytest.mark.parametrize(
    "listed",
    [
        modules("Transformer", "Pooling", "Dense", "Normalize"),
        modules("Transformer", "Normalize"),
        modules("Pooling"),
        [{"type": f"{KIND}.Transformer", "path": "0_Transformer"}, *modules("Transformer", "Pooling")[1:]],
        [{"type": "my.own.Pooling", "path": "1_Pooling"}],
        [{"type": f"{KIND}.Pooling", "path": "../other"}],
        [{"type": f"{KIND}.Pooling", "path": "/etc"}],
        [{"type": f"{KIND}.Pooling"}],
        ["Pooling"],
        {"a": 1},
        [{}] * 100,
    ],
)
def test_other_modules_and_paths_that_lead_elsewhere_are_refused(folder: Path, listed: Any):
    write(folder, "modules.json", listed)
    with pytest.raises(LoadError, match=r"modules\.json"):
        read_layout(folder, None)


def test_a_missing_pooling_folder_is_refused(folder: Path):
    shutil.rmtree(folder / "1_Pooling")
    with pytest.raises(LoadError, match=r"1_Pooling has no config\.json"):
        read_layout(folder, None)


def test_without_modules_models_yaml_has_to_say_how(folder: Path):
    (folder / "modules.json").unlink()
    with pytest.raises(LoadError, match=r"write `pooling` of the model in models\.yaml"):
        read_layout(folder, None)
    assert read_layout(folder, "last") == VectorLayout("last")


def test_prompts_of_the_folder_stand_before_inputs(folder: Path):
    prompts = {"query": "Find: ", "document": "", "odd": 3}
    write(folder, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    assert read_layout(folder, None).prefixes == {"query": "Find: ", "document": "", "": "Find: "}


def test_the_last_positions_of_roberta_are_no_tokens(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    write(
        folder,
        "config.json",
        {**config, "model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1},
    )
    (folder / "sentence_bert_config.json").unlink()
    assert check_pooling_folder(folder)[0] == 512


def test_the_pooling_configuration_is_fetched_with_the_model(folder: Path):
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    assert "1_Pooling/config.json" in chosen(
        [*paths, "1_Pooling/pytorch_model.bin", "2_Dense/model.safetensors"], folder
    )

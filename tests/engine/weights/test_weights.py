"""A model folder is checked before anything of it is loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest

from engine import LoadError
from engine.demo import weights_dir
from engine.weights.safety import check_chat_folder, check_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(weights_dir("chat"), tmp_path / "model")


def replace(folder: Path, name: str, content: bytes | None) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)


def safetensors(header: object, tensors: bytes = b"", *, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + tensors


def test_the_demo_model_may_be_loaded(folder: Path):
    check_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"", "cannot be read as JSON"),
        ("config.json", b'{"a": ', "cannot be read as JSON"),
        ("config.json", b"[" * 100_000, "cannot be read as JSON"),
        ("config.json", b"\xff\xfe{}", "cannot be read as JSON"),
        ("config.json", b'"' + b"x" * 5 * 2**20 + b'"', "larger than 4 MiB"),
        ("config.json", b'{"auto_map": {"AutoModel": "evil.Model"}}', "auto_map"),
        ("config.json", b'{"text_config": [{"auto_map": {}}]}', "auto_map"),
        ("config.json", b'{"x": {"\\u0061uto_map" : null}}', "auto_map"),
        ("model.safetensors", None, "has no .safetensors file"),
        ("model.safetensors", b"", "cut off or damaged"),
        ("model.safetensors", b"\x02\0\0", "cut off or damaged"),
        ("model.safetensors", safetensors({}, length=2**62), "cut off or damaged"),
        ("model.safetensors", safetensors({}, length=0), "cut off or damaged"),
        ("model.safetensors", safetensors([]), "cut off or damaged"),
        ("model.safetensors", safetensors({"a": 1}), "cut off or damaged"),
        ("model.safetensors", safetensors({"a": {"data_offsets": [0, "x"]}}), "cut off or damaged"),
        ("model.safetensors", safetensors({"a": {"data_offsets": [0, 10]}}, b"123456789"), "cut off or damaged"),
        ("model.safetensors", safetensors({"a": {"data_offsets": [0, 8]}}, b"123456789"), "cut off or damaged"),
        ("model.safetensors", (50_000).to_bytes(8, "little") + b"[" * 50_000, "cut off or damaged"),
        ("model.safetensors", (8).to_bytes(8, "little") + b"not JSON", "cut off or damaged"),
    ],
)
def test_a_folder_that_is_broken_or_unsafe_is_refused_by_name(
    folder: Path, name: str, content: bytes | None, complaint: str
):
    replace(folder, name, content)
    with pytest.raises(LoadError, match=complaint) as caught:
        check_folder(folder)
    assert "model" in caught.value.message
    assert str(folder.parent) not in caught.value.message


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]},
        {"dtype": "F9", "shape": [1], "data_offsets": [9, 8]},
        {"dtype": "F32", "shape": [10**4000] * 4000, "data_offsets": [0, 8]},  # a minute's multiplication
        {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]},
    ],
    ids=lambda tensor: f"{tensor['dtype']}-{len(tensor['shape'])}-{tensor['data_offsets']}",
)
def test_a_tensor_that_is_not_as_large_as_its_place_is_named(folder: Path, tensor: dict[str, object]):
    header = {"right": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}, "wrong": tensor}
    replace(folder, "model.safetensors", safetensors(header, b"12345678"))
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged.*the tensor wrong"):
        check_folder(folder)


def test_a_number_format_of_a_later_time_is_left_to_the_loader(folder: Path):
    header = {"a": {"dtype": "F9", "shape": [100], "data_offsets": [0, 8]}}
    replace(folder, "model.safetensors", safetensors(header, b"12345678"))
    check_folder(folder)


def test_a_file_that_the_index_names_and_that_is_missing_is_named(folder: Path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"model/model-00002-of-00002\.safetensors is missing"):
        check_folder(folder)


def test_a_chat_model_without_a_tokenizer_is_refused(folder: Path):
    check_chat_folder(folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    check_chat_folder(folder)
    (folder / "tokenizer.model").unlink()
    with pytest.raises(LoadError, match="has no tokenizer"):
        check_chat_folder(folder)


def test_a_text_that_speaks_of_code_is_none(folder: Path):
    config = json.loads((folder / "config.json").read_bytes())
    replace(folder, "config.json", json.dumps(config | {"notes": ['"auto_map": {}', "auto_map"]}).encode())
    check_folder(folder)


def test_a_download_that_stopped_early_is_noticed_wherever_it_stopped(folder: Path):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for kept in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises(LoadError, match="cut off or damaged"):
            check_folder(folder)


def test_pickled_weights_do_not_count_as_weights(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="pickle"):
        check_folder(folder)


def test_the_second_of_two_files_is_checked_as_well(folder: Path):
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"short")
    with pytest.raises(LoadError, match="00002"):
        check_folder(folder)


def test_an_index_that_leads_to_pickles_is_refused(folder: Path):
    index = {"weight_map": {"a": "evil.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="names files that are not safetensors"):
        check_folder(folder)


def test_what_is_no_file_is_refused_and_not_waited_for(folder: Path):
    os.mkfifo(folder / "more.safetensors")
    with pytest.raises(LoadError, match=r"more\.safetensors is not a file"):
        check_folder(folder)


def test_the_index_of_a_model_with_many_experts_is_read(folder: Path):
    index = {"weight_map": {f"layers.{number}.{'x' * 60}": "model.safetensors" for number in range(70_000)}}
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert file.stat().st_size > 5 * 2**20
    check_folder(folder)

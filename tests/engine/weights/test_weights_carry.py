"""Verifying, carrying, listing and removing model folders: what a disk or a stranger did to them is noticed."""

import json
import os
import shutil
from pathlib import Path

import pytest
from weight_parts import FILES, NAME, REPOSITORY, SHARD, model_files

from engine.errors import EngineError, LoadError, WeightsError
from engine.weights.manifest import MANIFEST, Manifest, ModelFile, is_complete, read_manifest, verify, write_manifest
from engine.weights.transfer import carry, found_below, local_folders, remove


def fetched(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """A folder as a pull leaves it."""
    from hashlib import sha256

    listed = []
    for name, content in (files or model_files()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        listed.append(ModelFile(path=name, size_bytes=len(content), sha256=sha256(content).hexdigest()))
    write_manifest(folder, Manifest(repository=REPOSITORY, revision="c" * 40, files=tuple(listed)))
    return folder


def copy(source: Path, root: Path, name: str = NAME) -> tuple[Manifest, bool]:
    return carry(source, root, name, lambda *_: None)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("flip", "model-00001-of-00002.safetensors is damaged"),
        ("cut", "model-00001-of-00002.safetensors has 1000 bytes instead of"),
        ("remove", "model-00001-of-00002.safetensors is missing"),
        ("link", "model-00001-of-00002.safetensors is not a regular file"),
        ("add", "extra.safetensors does not belong to the model"),
    ],
)
def test_each_kind_of_damage_is_named_and_is_never_carried_on(damage: str, told: str, tmp_path: Path):
    folder = fetched(tmp_path / NAME)
    assert verify(folder) == []
    shard = folder / SHARD
    if damage == "flip":
        content = bytearray(shard.read_bytes())
        content[700_000] ^= 1
        shard.write_bytes(content)
    elif damage == "cut":
        os.truncate(shard, 1000)
    elif damage == "remove":
        shard.unlink()
    elif damage == "link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    else:
        (folder / "extra.safetensors").write_bytes(b"x")
    (problem,) = verify(folder)
    assert problem.startswith(told)
    assert is_complete(folder) == (damage in {"flip", "add"})
    if damage == "add":
        copy(folder, tmp_path / "usb")
        assert not (tmp_path / "usb" / NAME / "extra.safetensors").exists(), "only what the manifest names is carried"
    else:
        with pytest.raises(WeightsError):
            copy(folder, tmp_path / "usb")
        assert not (tmp_path / "usb" / NAME).exists()


def test_notes_of_the_owner_are_welcome_in_a_folder(tmp_path: Path):
    folder = fetched(tmp_path / NAME)
    (folder / "voices.yaml").write_text("voices: []")
    assert verify(folder) == []


def test_a_folder_is_carried_there_and_back(tmp_path: Path):
    here = fetched(tmp_path / "here" / NAME)
    assert copy(here, tmp_path / "usb") == (read_manifest(here), True)
    assert not (tmp_path / "usb" / ".partial").exists()
    assert found_below(tmp_path / "usb") == {NAME: tmp_path / "usb" / NAME}
    assert found_below(tmp_path / "usb" / NAME) == {"": tmp_path / "usb" / NAME}
    copy(tmp_path / "usb" / NAME, tmp_path / "there", "voices/other-name")
    assert verify(tmp_path / "there" / "voices" / "other-name") == []
    assert copy(here, tmp_path / "usb")[1] is False
    (tmp_path / "usb" / NAME / "config.json").unlink()
    with pytest.raises(WeightsError, match="exists already and is different"):
        copy(here, tmp_path / "usb")


def test_a_directory_without_models_is_refused(tmp_path: Path):
    (tmp_path / "some" / "thing").mkdir(parents=True)
    with pytest.raises(WeightsError, match="has no model"):
        found_below(tmp_path)
    with pytest.raises(WeightsError, match="does not exist"):
        found_below(tmp_path / "nothing")


def test_an_interrupted_copy_goes_on_where_it_was(tmp_path: Path):
    source = fetched(tmp_path / NAME)
    seen: dict[str, int] = {}

    def until_half(path: str, done: int, size: int) -> None:
        if path == SHARD and done > 2**20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry(source, tmp_path / "there", NAME, until_half)
    assert not (tmp_path / "there" / NAME).exists()
    assert [one.state for one in local_folders(tmp_path / "there")] == ["partial"]
    carry(source, tmp_path / "there", NAME, lambda path, done, _: seen.setdefault(path, done))
    assert seen[SHARD] >= 2**20
    assert verify(tmp_path / "there" / NAME) == []


@pytest.mark.parametrize("path", ["../x.json", "/etc/x.json", "a\\x.json", "a/../x.json", "", ".", "a//x.json"])
def test_a_manifest_with_a_path_that_leads_out_is_refused(path: str, tmp_path: Path):
    folder = fetched(tmp_path / NAME)
    told = json.loads((folder / MANIFEST).read_text())
    told["files"][0]["path"] = path
    (folder / MANIFEST).write_text(json.dumps(told))
    with pytest.raises(WeightsError, match="cannot be read"):
        copy(folder, tmp_path / "there")
    assert not (tmp_path / "there").exists()
    assert not is_complete(folder)


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"files": []}, {"revision": "main"}, {"more": 1}, {"repository": "../x"}]
)
def test_a_manifest_of_another_kind_is_refused(change: dict[str, object], tmp_path: Path):
    folder = fetched(tmp_path / NAME)
    told = json.loads((folder / MANIFEST).read_text()) | change
    (folder / MANIFEST).write_text(json.dumps(told))
    with pytest.raises(WeightsError, match="cannot be read"):
        verify(folder)
    assert not is_complete(folder)


def test_links_and_pipes_in_a_carried_folder_are_never_followed(tmp_path: Path):
    secret = tmp_path / "secret.json"
    secret.write_bytes(b"{}")
    folder = fetched(tmp_path / NAME, model_files() | {"voices/a.safetensors": model_files()[SHARD]})
    for name, other in (("generation_config.json", secret), ("voices", tmp_path / "moved")):
        if (folder / name).is_dir():
            (folder / name).rename(other)
        else:
            (folder / name).unlink()
        (folder / name).symlink_to(other)
        with pytest.raises(WeightsError, match="links are never followed"):
            copy(folder, tmp_path / f"without {name}")
        (folder / name).unlink()
        if other.is_dir():
            other.rename(folder / name)
        else:
            (folder / name).write_bytes(model_files()[name])
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(WeightsError, match="is not a regular file"):
        copy(folder, tmp_path / "there")
    assert not (tmp_path / "there" / NAME).exists()


@pytest.mark.parametrize("name", ["evil.py", "pytorch_model.bin", "model.pt", ".bashrc", "run"])
def test_a_carried_folder_brings_no_other_kinds_of_files(name: str, tmp_path: Path):
    folder = fetched(tmp_path / NAME, model_files() | {name: b"x"})
    with pytest.raises(WeightsError, match="can run code and are refused"):
        copy(folder, tmp_path / "there")


def test_a_carried_model_with_code_is_refused(tmp_path: Path):
    folder = fetched(tmp_path / NAME, model_files() | {"config.json": b'{"auto_map": {}}'})
    with pytest.raises(LoadError, match="auto_map"):
        copy(folder, tmp_path / "there")
    assert not (tmp_path / "there" / NAME).exists()


def test_the_list_tells_folders_apart(tmp_path: Path):
    fetched(tmp_path / "whole")
    fetched(tmp_path / "voices" / "amy")
    fetched(tmp_path / "broken")
    (tmp_path / "broken" / SHARD).unlink()
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (tmp_path / "linked").symlink_to(own)
    (tmp_path / "empty").mkdir()
    half = tmp_path / ".partial" / "team%2Fhalf" / "model"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    found = {one.folder: one for one in local_folders(tmp_path)}
    assert {name: one.state for name, one in found.items()} == {
        "whole": "complete",
        "voices/amy": "complete",
        "broken": "damaged",
        "own": "own",
        "linked": "own",
        "team/half": "partial",
    }
    assert found["whole"].repository == REPOSITORY
    assert found["whole"].size_bytes > sum(map(len, model_files().values()))
    assert local_folders(tmp_path / "nowhere") == []


def test_a_removed_folder_is_gone_with_what_was_unfinished_of_it(tmp_path: Path):
    size = sum((fetched(tmp_path / NAME) / name).stat().st_size for name in (*FILES, MANIFEST))
    assert remove(tmp_path, NAME) == size
    assert list(tmp_path.iterdir()) == []
    half = tmp_path / ".partial" / NAME / "parts"
    half.mkdir(parents=True)
    (half / SHARD).write_bytes(bytes(100))
    assert remove(tmp_path, NAME) == 100
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightsError, match="There is no folder"):
        remove(tmp_path, NAME)


def test_of_a_link_only_the_link_is_removed(tmp_path: Path):
    there = fetched(tmp_path / "elsewhere")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / NAME).symlink_to(there)
    remove(tmp_path / "weights", NAME)
    assert verify(there) == []
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_folder_without_manifest_cannot_be_verified_or_carried(tmp_path: Path):
    folder = fetched(tmp_path / NAME)
    (folder / MANIFEST).unlink()
    with pytest.raises(WeightsError, match="has no manifest"):
        verify(folder)
    with pytest.raises(EngineError, match="has no manifest"):
        copy(folder, tmp_path / "there")
    shutil.rmtree(folder)
    with pytest.raises(WeightsError, match="is not there"):
        verify(folder)

"""Voices from folders that hold links, devices, odd names, too much, or nothing that may be read."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from voice_folders import (
    GOOD,
    ONNX,
    OTHER,
    SAFETENSORS,
    complaint_of,
    ids,
    kokoro,
    only_warning,
    overlay,
    piper,
    put,
    read,
    vits,
)

from engine.voices.catalogue import MAX_MODELS, read_catalogue
from engine.voices.readers import MAX_SPEAKERS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A good model, `good`, beside which a bad one is put."""
    overlay(vits(tmp_path / "voices", "good"), GOOD)
    return tmp_path / "voices"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "voices.yaml", "README.md"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "link out", "link to itself", "device"])
def test_what_is_no_plain_file_in_the_folder_is_not_read(root: Path, tmp_path: Path, name: str, kind: str):
    folder = overlay(vits(root, "bad"), OTHER)
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.symlink_to(put(tmp_path, "secret", "{}") if kind == "link out" else file)
    assert complaint_of(root).startswith(f"bad is hidden: {name} ")


def test_weights_that_are_no_plain_files_are_not_loaded(root: Path, tmp_path: Path):
    for name in ("fifo", "link"):
        folder = overlay(vits(root, name), OTHER | {"id": name})
        (folder / "model.safetensors").unlink()
    os.mkfifo(root / "fifo" / "model.safetensors")
    (root / "link" / "model.safetensors").symlink_to(put(tmp_path, "outside.safetensors", SAFETENSORS))
    catalogue = read(root)
    assert {voice.id: voice.available for voice in catalogue.voices} == {"selam": True, "fifo": False, "link": False}
    assert [warning.model for warning in catalogue.warnings] == ["fifo", "link"]


def test_a_link_that_stays_in_the_folder_is_followed(root: Path):
    file = root / "good" / "config.json"
    file.rename(root / "good" / "blob")
    file.symlink_to("blob")
    catalogue = read(root)
    assert (ids(catalogue), catalogue.warnings) == (["selam"], ())


def test_a_folder_of_voices_that_leads_out_is_not_read(root: Path, tmp_path: Path):
    folder = kokoro(root, "bad")
    put(tmp_path, "elsewhere/af_heart.safetensors", SAFETENSORS)
    (folder / "voices").symlink_to(tmp_path / "elsewhere")
    assert "voices is a link that leads out of the folder" in complaint_of(root)


def test_a_model_folder_that_is_a_link_is_not_followed(root: Path, tmp_path: Path):
    overlay(vits(tmp_path, "outside"), OTHER)
    (root / "bad").symlink_to(tmp_path / "outside")
    assert "bad is left out: it is a link" in complaint_of(root)


@pytest.mark.parametrize(
    "name", ["a b", "-rf", "a\nb", "\u202eabc", "ሰላም", "x" * 101, "a\x1b[2J", os.fsdecode(b"\xff\xfe")]
)
def test_a_folder_with_a_name_that_no_answer_should_carry_is_left_out(root: Path, name: str):
    overlay(vits(root, name), OTHER)
    assert "rename the folder" in complaint_of(root)


def test_thousands_of_links_are_a_few_warnings(root: Path):
    for number in range(2000):
        (root / f"l{number}").symlink_to("/")
    catalogue = read(root)
    assert ids(catalogue) == ["selam"]
    assert len(catalogue.warnings) == 21
    assert catalogue.warnings[-1].message == "voices: 1980 more folders or files are left out"


def test_files_of_kokoro_with_odd_names_are_left_out(root: Path):
    odd = ["af_\n.safetensors", "af_\u202e.safetensors", f"af_{'x' * 80}.safetensors", os.fsdecode(b"af_\xff.pt")]
    kokoro(root, "k", "af_heart.safetensors", *odd)
    catalogue = read(root)
    assert ids(catalogue) == ["selam", "kokoro-af-heart"]
    assert "4 file(s) in voices/ are left out" in catalogue.warnings[0].message


def test_a_file_of_piper_with_an_odd_name_makes_no_odd_voice(root: Path):
    piper(root, "bad", "a\n../\u202e".replace("/", "_"))
    assert "nothing says `name` and `gender`" in complaint_of(root)
    shutil.rmtree(root / "bad")
    piper(root, "bad", "x" * 200, language={"code": "so"})
    assert "nothing says `id` and `name` and `gender`" in complaint_of(root)


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """A folder that other users of the machine reach, for a test that becomes one."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name) / "voices"


@pytest.mark.parametrize("place", ["bad", "bad/config.json", "bad/voices.yaml", ""])
def test_what_may_not_be_read_is_named(readable_by_all: Path, place: str):
    overlay(vits(readable_by_all, "good"), GOOD)
    overlay(vits(readable_by_all, "bad"), OTHER)
    (readable_by_all / place).chmod(0)
    was = os.geteuid()
    try:
        if was == 0:
            os.seteuid(65534)
        catalogue = read(readable_by_all)
    finally:
        os.seteuid(was)
        (readable_by_all / place).chmod(0o755)
    assert ids(catalogue) == (["selam"] if place else [])
    assert "may not be read" in only_warning(catalogue)


def test_a_model_of_too_many_voices_is_cut_with_a_warning(root: Path):
    overlay(vits(root, "many", speakers=10**9), OTHER | {"speaker": MAX_SPEAKERS - 1})
    assert f"only the first {MAX_SPEAKERS} of its 1000000000 voices" in complaint_of(root, voices=["selam", "abebe"])
    shutil.rmtree(root / "many")
    speakers = {f"s{number}": number for number in range(5000)}
    piper(root, "many", num_speakers=5000, speaker_id_map=speakers)
    messages = [warning.message for warning in read(root).warnings]
    assert len(messages) == 2
    assert "voices 0, 1, 2, 3, 4 and 995 more are hidden: nothing says `gender`" in messages[1]


def test_too_many_models_are_cut_with_a_warning(root: Path):
    for number in range(MAX_MODELS + 5):
        (root / f"m{number}").mkdir()
    messages = [warning.message for warning in read(root).warnings]
    assert "voices: 6 of its 106 models are left out: 100 are read at most" in messages


def test_a_folder_of_thousands_of_files_is_no_model(root: Path):
    for number in range(10_001):
        (root / "good" / f"f{number}").touch()
    assert "has more than 10000 files" in complaint_of(root, voices=[])


def test_two_voices_of_one_id_in_one_model_are_no_error(root: Path):
    overlay(vits(root, "twice", speakers=2), OTHER | {"speaker": 0}, OTHER | {"speaker": 1})
    assert "two voices have the id abebe" in complaint_of(root, voices=["selam", "abebe"])
    shutil.rmtree(root / "twice")
    folder = piper(root, "twice", "so_SO-x-low", num_speakers=2, speaker_id_map={"A b": 0, "a-b": 1})
    overlay(folder, {"speaker": 0, "gender": "male"}, {"speaker": 1, "gender": "male"})
    assert any("two voices have the id piper-so-so-x-low-a-b" in one.message for one in read(root).warnings)


def test_an_empty_folder_and_a_root_that_is_a_file_are_named(root: Path, tmp_path: Path):
    (root / "empty").mkdir()
    assert "empty is hidden: it is not a TTS model that Hearth knows" in complaint_of(root)
    catalogue = read_catalogue(put(tmp_path, "file", ONNX))
    assert "file cannot be read" in only_warning(catalogue)

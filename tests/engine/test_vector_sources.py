"""Vectors of other weights do not fit stored ones: a change behind a name is said."""

import shutil
from pathlib import Path

import pytest

from engine.demo import weights_dir
from engine.pool.records import keep_source_of_vectors


def test_other_weights_behind_the_same_name_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = shutil.copytree(weights_dir("embedding"), tmp_path / "model")
    for _ in range(2):
        keep_source_of_vectors(tmp_path, "a", folder)
    assert caplog.records == []
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    keep_source_of_vectors(tmp_path, "b", folder)
    assert caplog.records == []
    keep_source_of_vectors(tmp_path, "a", folder)
    (said,) = caplog.messages
    assert said.startswith("a makes vectors with other weights than before (model ")
    keep_source_of_vectors(tmp_path, "a", folder)
    assert len(caplog.records) == 1


def test_without_a_data_folder_nothing_is_kept(tmp_path: Path):
    keep_source_of_vectors(None, "a", weights_dir("embedding"))
    assert list(tmp_path.iterdir()) == []

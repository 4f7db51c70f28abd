"""What models took is kept from one start to the next, and nothing that cannot be true."""

from pathlib import Path

import pytest
from plan_parts import model, variant

from engine.placement.hardware import GIB
from engine.placement.needs import FILE_NAME, Footprints

BIG = model("a", variant("big", 14)).variants[0]


def test_what_was_measured_is_there_after_a_restart(tmp_path: Path):
    Footprints().with_(BIG, 2, "GPU", 7 * GIB).write(tmp_path)
    kept = Footprints.read(tmp_path)
    assert kept.of(BIG, 2, "GPU") == 7 * GIB
    assert kept.of(BIG, 1, "GPU") is None
    assert kept.of(BIG, 2, "another GPU") is None
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_another_revision_is_another_size():
    kept = Footprints().with_(BIG, 1, "GPU", 14 * GIB)
    newer = BIG.model_copy(update={"revision": "b" * 40})
    assert kept.of(newer, 1, "GPU") is None


@pytest.mark.parametrize("used", [-GIB, 0, GIB, 90 * GIB])
def test_a_measurement_that_cannot_be_true_is_not_kept(used: int):
    assert Footprints().with_(BIG, 1, "GPU", used).of(BIG, 1, "GPU") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"footprints": [1]}', '{"footprints": {"a": {"bytes": "x"}}}'])
def test_a_broken_file_costs_nothing_but_the_measurements(tmp_path: Path, text: str):
    (tmp_path / FILE_NAME).write_text(text)
    assert not Footprints.read(tmp_path).footprints


def test_a_folder_that_is_not_there_costs_nothing(tmp_path: Path):
    Footprints().with_(BIG, 1, "GPU", 14 * GIB).write(tmp_path / "gone")
    assert not Footprints.read(tmp_path / "gone").footprints

"""Small files are replaced whole, or stay as they were."""

from pathlib import Path

import pytest

from engine.files import write_atomically


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_else_is_left_there(tmp_path: Path, durable):
    for content in ("first", b"second"):
        write_atomically(tmp_path / "a.json", content, durable=durable)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.json": "second"}


def test_what_cannot_be_replaced_stays_and_no_part_is_left(tmp_path: Path):
    (tmp_path / "a.json" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "a.json", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_private_file_is_only_ours_even_where_another_part_lay(tmp_path: Path):
    (tmp_path / ".key.part").write_text("for all to read")
    write_atomically(tmp_path / "key", b"secret", private=True)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["key"]

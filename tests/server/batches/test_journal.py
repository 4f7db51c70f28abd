"""The journal of a batch: whatever is cut off its end, what stands before it counts, and each line once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.batches.folder import Folder
from server.batches.journal import Index, Journal, encode

LINES = 5
BATCH = "batch_" + "0" * 32


def record(line: int, *, ok: bool = True, text: str = "") -> bytes:
    return encode(line, json.dumps({"line": line, "text": text}).encode(), ok=ok, tokens=(10, 2, 1, 0))


@contextmanager
def read(folder: Path, lines: int = LINES) -> Iterator[Index]:
    index = Index(folder, lines)
    try:
        yield index
    finally:
        index.close()


def segment(folder: Path, name: str, *records: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"".join(records))
    return folder / name


def test_cut_at_every_byte_of_its_last_record_only_that_one_is_missing(tmp_path: Path):
    records = [record(line, ok=line != 1) for line in range(LINES)]
    for cut in range(len(records[-1])):
        segment(tmp_path, "000000", *records[:-1], records[-1][:cut])
        with read(tmp_path) as index:
            assert [index.has(line) for line in range(LINES)] == [True, True, True, True, False], cut
            assert (index.tally.completed, index.tally.failed, index.tally.tokens) == (3, 1, [40, 8, 4, 0])
            assert index.record(LINES - 1) is None
            assert index.record(1) == (False, b'{"line": 1, "text": ""}')
    assert Index(segment(tmp_path, "000000", *records).parent, LINES).tally.completed == 4


def test_a_record_with_any_byte_changed_is_not_believed(tmp_path: Path):
    whole = record(2)
    for place in range(len(whole)):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        segment(tmp_path, "000000", record(1), changed)
        with read(tmp_path) as index:
            assert index.has(1)
            if index.has(2):  # all but the numbers before the checksum are covered by it
                assert index.record(2) == (changed.split()[1] == b"o", whole.split(b" ", 7)[7][:-1])


def test_the_zeros_that_a_power_cut_leaves_end_a_segment(tmp_path: Path):
    segment(tmp_path, "000000", record(0), b"\0" * 4096)
    segment(tmp_path, "000001", record(1))
    with read(tmp_path) as index:
        assert [index.has(line) for line in range(3)] == [True, True, False]
        assert index.next_segment == "000002"


def test_of_two_records_of_a_line_the_first_counts(tmp_path: Path):
    segment(tmp_path, "000000", record(0, text="first"), record(0, text="later"))
    segment(tmp_path, "000001", record(0, text="of another process"), record(1))
    with read(tmp_path) as index:
        assert index.record(0) == (True, b'{"line": 0, "text": "first"}')
        assert index.tally.completed == 2


async def test_what_was_appended_is_on_disk_when_the_block_ends(tmp_path: Path):
    folder = Folder(tmp_path)
    await folder.open()
    for number in range(2):
        async with Journal(folder, BATCH, f"{number:06d}") as journal:
            for line in range(number * 1000, number * 1000 + 1000):
                journal.append(record(line))
                await journal.room()
    assert Index(folder.journal(BATCH), 2000).tally.completed == 2000


@pytest.mark.parametrize("name", ["../../etc/passwd", "file-", "batch_" + "0" * 31 + "/", "file-" + "Z" * 32])
async def test_what_is_no_id_is_no_path(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="not an id"):
        Folder(tmp_path).file(name)

"""Generated images as files: real folders, real full disks. What is too old or too much goes, half a file never comes."""

import asyncio
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from image_parts import fill_up
from serving import async_poll_until, total_bytes
from small_disks import small_disk

from server.api.images.files import ImageFiles, StoredImage
from server.errors import ApiError

HOUR = 3600
IMAGE = b"\x89PNG" + bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "images"


def files_at(path: Path, *, max_bytes: int = 2**30, later_seconds: float = 0) -> ImageFiles:
    """Its clock is so much later than that of the file system."""
    return ImageFiles(path, retention_seconds=24 * HOUR, max_bytes=max_bytes, clock=lambda: time.time() + later_seconds)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def cleared_away(path: Path) -> None:
    path.rmdir()


def made(folder: Path, *names: str, mode: int = 0o700) -> None:
    folder.mkdir(mode=mode)
    for name in names:
        (folder / name).write_bytes(b"x")


def fill_with_text(file: Path) -> Path:
    file.write_bytes(b"in the way")
    return file


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def stored_at(folder: Path, seconds: Iterable[int]) -> list[str]:
    """Store images of ten bytes, each last changed at one of these moments."""
    folder.mkdir(exist_ok=True)
    names = []
    for number, moment in enumerate(seconds):
        names.append(f"{number:032x}.png")
        (folder / names[-1]).write_bytes(b"0123456789")
        os.utime(folder / names[-1], (moment, moment))
    return names


async def save_one_by_one(files: ImageFiles, path: Path, count: int, data: bytes = IMAGE) -> list[str]:
    """So that each is older than the next, whatever the clock's ticks."""
    stored = []
    for number in range(count):
        name = (await files.save(data, "png")).name
        moment = time.time() - count + number
        os.utime(path / name, (moment, moment))
        stored.append(name)
    return stored


async def test_an_image_is_read_as_it_was_stored_and_is_its_owners_alone(path: Path):
    async with files_at(path) as files:
        before = time.time()
        for kind in ("png", "jpeg", "webp"):
            stored = await files.save(IMAGE, kind)
            assert re.fullmatch(rf"[0-9a-f]{{32}}\.{kind}", stored.name)
            assert before + 24 * HOUR - 1 <= stored.expires_at <= time.time() + 24 * HOUR
            assert await files.read(stored.name) == IMAGE
            assert mode_of(path / stored.name) == 0o600
    assert mode_of(path) == 0o700


async def test_a_folder_that_set_up_made_for_everybody_is_closed(path: Path):
    made(path, mode=0o755)
    async with files_at(path):
        assert mode_of(path) == 0o700


async def test_nothing_but_an_image_of_ours_is_ever_read(path: Path):
    secret = path.parent / "secret.png"
    async with files_at(path) as files:
        secret.write_bytes(b"secret")
        (path / "hearth.db").write_bytes(b"secret")
        (path / f"{'a' * 32}.png.part").write_bytes(b"secret")
        stored = (await files.save(IMAGE, "png")).name
        for name in (
            "../secret.png",
            str(secret),
            f"x/../{stored}",
            f"./{stored}",
            f"{stored}/",
            f"{stored}\0",
            f"{stored}\n",
            f"{stored}.part",
            f"{'a' * 32}.png.part",
            stored.upper(),
            stored.replace("png", "jpeg"),
            "hearth.db",
            "",
            ".",
            "..",
            "\ud800",
            "a" * 5000,
        ):
            assert await files.read(name) is None, name


async def test_images_go_when_they_are_too_old(path: Path):
    async with files_at(path) as files:
        stored = await files.save(IMAGE, "png")
    async with files_at(path, later_seconds=23.9 * HOUR) as files:
        assert await files.read(stored.name) == IMAGE
    async with files_at(path, later_seconds=24.1 * HOUR) as files:
        assert await files.read(stored.name) is None
    assert names_in(path) == []


async def test_images_go_also_while_the_server_runs(path: Path):
    later = 0.0
    async with ImageFiles(
        path,
        retention_seconds=24 * HOUR,
        max_bytes=2**30,
        sweep_every_seconds=0.02,
        clock=lambda: time.time() + later,
    ) as files:
        await files.save(IMAGE, "png")
        later = 25.0 * HOUR
        await async_poll_until(lambda: not names_in(path), 30)


async def test_the_oldest_go_when_all_together_are_too_large(path: Path):
    async with files_at(path) as files:
        stored = await save_one_by_one(files, path, 20)
    async with files_at(path, max_bytes=10 * len(IMAGE)):
        kept = names_in(path)
    assert 9 <= len(kept) <= 10
    assert kept == sorted(stored[-len(kept) :])


@pytest.mark.parametrize(
    ("count", "kept"), [(16, 16), (17, 15), (20, 15)], ids=["as large as may be", "a little too large", "far too large"]
)
async def test_too_large_means_above_the_limit_and_a_sixteenth_is_freed_at_once(path: Path, count: int, kept: int):
    names = stored_at(path, range(2000, 2000 + count))
    await ImageFiles(path, retention_seconds=100, max_bytes=160, clock=lambda: 2050.0).sweep()
    assert names_in(path) == names[count - kept :]


async def test_an_image_is_too_old_from_the_second_on_at_which_its_link_ends(path: Path):
    names = stored_at(path, [1949, 1950, 1951])
    await ImageFiles(path, retention_seconds=100, max_bytes=100, clock=lambda: 2050.0).sweep()
    assert names_in(path) == names[2:]


async def test_a_write_that_fills_them_to_the_limit_sweeps_nothing(path: Path):
    files = ImageFiles(path, retention_seconds=100, max_bytes=len(IMAGE))
    async with files:
        [old] = stored_at(path, [1])
        await files.save(IMAGE, "png")
    assert old in names_in(path)


async def test_images_are_stored_in_a_data_directory_that_is_made_or_was_cleared_away(tmp_path: Path):
    files = files_at(tmp_path / "data" / "images")
    async with files:
        files.path.rmdir()
        files.path.parent.rmdir()
        name = (await files.save(IMAGE, "png")).name
        assert await files.read(name) == IMAGE
        (files.path / name).unlink()
        files._delete_now(name)


async def test_a_write_that_makes_them_too_large_makes_room(path: Path):
    most = 10 * len(IMAGE)
    async with files_at(path, max_bytes=most) as files:
        for _ in range(4):
            newest = await save_one_by_one(files, path, 6)
            await async_poll_until(lambda: total_bytes(path.iterdir()) <= most, 30)
            assert await files.read(newest[-1]) == IMAGE
    assert len(names_in(path)) >= 8


async def test_what_comes_during_a_sweep_does_not_stay_too_large(path: Path):
    seen, go_on = threading.Event(), threading.Event()

    class HeldUp(ImageFiles):
        def _sweep_now(self) -> int:
            kept = super()._sweep_now()
            seen.set()
            assert go_on.wait(30)
            return kept

    most = 10 * len(IMAGE)
    go_on.set()
    async with HeldUp(path, retention_seconds=24 * HOUR, max_bytes=most) as files:
        seen.clear()
        go_on.clear()
        for _ in range(11):
            await files.save(IMAGE, "png")
        assert await asyncio.to_thread(seen.wait, 30)
        for _ in range(5):
            await files.save(IMAGE, "png")
        assert len(names_in(path)) > 10
        go_on.set()
        await async_poll_until(lambda: total_bytes(path.iterdir()) <= most, 30)


async def test_what_a_killed_server_had_half_written_goes_at_the_start_and_nothing_else(path: Path):
    made(path, f".{'a' * 32}.png.part", f"{'b' * 32}.webp.part", "notes.part", "notes.png", f"{'c' * 32}.png")
    async with files_at(path, later_seconds=-HOUR):
        pass
    assert names_in(path) == [f"{'c' * 32}.png", "notes.part", "notes.png"]
    async with files_at(path, later_seconds=48 * HOUR, max_bytes=0):
        pass
    assert names_in(path) == ["notes.part", "notes.png"]


async def test_of_a_shared_folder_only_what_is_half_written_for_an_hour_goes(path: Path):
    parts = [f".{moment:032}.png.part" for moment in (6399, 6400, 6401)]
    made(path, *parts)
    for moment, part in zip((6399, 6400, 6401), parts, strict=True):
        os.utime(path / part, (moment, moment))
    async with ImageFiles(path, retention_seconds=HOUR, max_bytes=2**30, shared=True, clock=lambda: 10_000.0):
        assert names_in(path) == parts[2:]


async def test_a_folder_that_somebody_has_cleared_away_is_made_again(path: Path):
    async with files_at(path) as files:
        cleared_away(path)
        await files.sweep()
        stored = await files.save(IMAGE, "png")
        assert await files.read(stored.name) == IMAGE
    assert mode_of(path) == 0o700


async def test_discarded_images_are_gone(path: Path):
    async with files_at(path) as files:
        stored = [await files.save(IMAGE, "png") for _ in range(3)]
        files.discard(*(image.name for image in stored[:2]), "0" * 32 + ".png")
    assert names_in(path) == [stored[2].name]


class GatedFiles(ImageFiles):
    """Holds each write open until the gate is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, retention_seconds=HOUR, max_bytes=2**30)
        self.entered, self.gate = threading.Event(), threading.Event()

    def _write_now(self, name: str, data: bytes) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        super()._write_now(name, data)


async def test_a_caller_who_leaves_while_a_file_is_written_leaves_none_behind(path: Path):
    async with GatedFiles(path) as files:
        saving = asyncio.create_task(files.save(IMAGE, "png"))
        assert await asyncio.to_thread(files.entered.wait, 30)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        files.gate.set()
    assert names_in(path) == []


@pytest.fixture(name="disk")
def disk_of_256_kib(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "256k"):
        yield disk


async def assert_refused(files: ImageFiles, data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        await files.save(data, "png")
    assert (caught.value.status, caught.value.code) == (507, "insufficient_storage")
    assert caught.value.body()["type"] == "server_error"
    assert caught.value.headers == {"x-should-retry": "false"}
    assert "b64_json" in caught.value.message


async def test_a_disk_that_gets_full_in_the_middle_of_a_file_leaves_no_half_of_it(disk: Path):
    path = disk / "images"
    async with files_at(path) as files:
        small = await files.save(bytes(100_000), "png")
        await assert_refused(files, bytes(1_000_000))
        assert names_in(path) == [small.name]
        assert os.statvfs(disk).f_bavail > 0
        again = await files.save(bytes(100_000), "png")
        assert await files.read(again.name) == bytes(100_000)


async def test_a_disk_without_one_free_byte_refuses_and_recovers(disk: Path):
    path = disk / "images"
    async with files_at(path) as files:
        kept: StoredImage = await files.save(bytes(4096), "png")
        ballast = fill_up(disk / "ballast")
        await assert_refused(files, IMAGE)
        assert names_in(path) == [kept.name]
        ballast.unlink()
        assert await files.read((await files.save(IMAGE, "png")).name) == IMAGE


async def test_another_trouble_of_the_disk_is_not_told_as_a_full_one(path: Path):
    async with files_at(path) as files:
        cleared_away(path)
        in_the_way = fill_with_text(path)
        with pytest.raises(OSError, match=r"directory|exists"):
            await files.save(IMAGE, "png")
        in_the_way.unlink()


async def test_shared_storage_that_does_not_answer_is_said_to(path: Path):
    async with ImageFiles(path, retention_seconds=24 * HOUR, max_bytes=2**30, shared=True) as files:
        stored = await files.save(IMAGE, "png")
        (path / stored.name).unlink()
        cleared_away(path)
        fill_with_text(path)
        for asked in (files.save(IMAGE, "png"), files.read(stored.name)):
            with pytest.raises(ApiError) as caught:
                await asked
            assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "10"})

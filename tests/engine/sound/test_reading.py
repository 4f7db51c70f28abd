"""A sound file is read in a process of its own, in the usual formats; what is none is refused, whatever it does."""

import asyncio
import os
import random
import signal
import struct
import wave
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.sound import Piece
from engine.sound.reading import SoundFile

RATE = 22_050
CODECS = {"flac": "flac", "ogg": "libopus", "mp3": "libmp3lame", "m4a": "aac", "webm": "libopus"}


def two_tones() -> NDArray[np.float32]:
    """A second of sound, two of silence, and a second of sound."""
    at = np.arange(4 * RATE) / RATE
    sound = 0.2 * np.sin(2 * np.pi * 400 * at)
    sound[RATE : 3 * RATE] = 0
    return sound.astype(np.float32)


def write_wav(path: Path, sound: NDArray[np.float32], rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((sound * 2**15).astype("<i2").tobytes())
    return path


def write(path: Path, sound: NDArray[np.float32]) -> Path:
    """In stereo, by FFmpeg, in the format that the name says."""
    kind = path.suffix[1:]
    if kind == "wav":
        return write_wav(path, sound)
    rate = 48_000 if CODECS[kind] == "libopus" else RATE
    with av.open(str(path), "w", format="ipod" if kind == "m4a" else kind) as container:
        stream = container.add_stream(CODECS[kind], rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.stack([sound, sound]), format="fltp", layout="stereo")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


async def read(path: Path, *, piece_seconds: float = 30, most_seconds: float = 3600) -> tuple[list[Piece], float]:
    pieces = []
    async with SoundFile(path, piece_seconds=piece_seconds, most_seconds=most_seconds) as file:
        while (piece := await file.next()) is not None:
            pieces.append(piece)
        return pieces, file.seconds


@pytest.mark.parametrize("kind", ["wav", *CODECS])
async def test_every_format_gives_the_same_pieces(tmp_path: Path, kind: str):
    pieces, seconds = await read(write(tmp_path / f"sound.{kind}", two_tones()))
    assert seconds == pytest.approx(4, abs=0.15)
    assert [round(piece.start, 1) for piece in pieces] == [0.0, pytest.approx(2.8, abs=0.21)]
    assert [piece.seconds for piece in pieces] == pytest.approx([1.2, 1.2], abs=0.3)


@pytest.mark.parametrize("name", ["nothing", "text", "playlist", "picture", "no rate"])
async def test_what_is_no_sound_is_refused(tmp_path: Path, name: str):
    secret = write_wav(tmp_path / "secret.wav", two_tones())
    whole = secret.read_bytes()
    content = {
        "nothing": b"",
        "text": b"What is this? " * 1000,
        "playlist": f"#EXTM3U\n#EXTINF:4,\nfile://{secret}\n#EXT-X-ENDLIST\n".encode(),
        "picture": b"\x89PNG\r\n\x1a\n" + bytes(1000),
        "no rate": whole[:24] + struct.pack("<I", 3) + whole[28:],
    }[name]
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(RequestError) as refused:
        await read(tmp_path / "file")
    assert refused.value.param == "file"
    assert str(tmp_path) not in refused.value.message


async def test_a_recording_that_is_too_long_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="longer than 2 s"):
        await read(write_wav(tmp_path / "sound", two_tones()), most_seconds=2)


async def test_what_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path):
    whole = write(tmp_path / "sound.mp3", two_tones()).read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    pieces, seconds = await read(tmp_path / "half")
    assert len(pieces) == 1
    assert 1.5 < seconds < 2.5


async def test_its_process_ends_with_the_reading_and_when_it_is_killed_the_file_is_to_blame(tmp_path: Path):
    path = write_wav(tmp_path / "sound", two_tones())
    async with SoundFile(path, piece_seconds=30, most_seconds=60) as file:
        assert await file.next() is not None
        os.kill(file._worker.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="could not be read"):
            await file.next()
    async with SoundFile(path, piece_seconds=30, most_seconds=60) as file:
        assert psutil.Process(file._worker.pid).ppid() == os.getpid()
    await asyncio.wait_for(file._worker.died.wait(), 60)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.rounds)])
async def test_changed_files_are_read_or_refused(tmp_path: Path, count: int):
    chance = random.Random(count)  # noqa: S311
    originals = [write(tmp_path / f"sound.{kind}", two_tones()).read_bytes() for kind in ("wav", *CODECS)]
    outcomes = []
    for number in range(count):
        content = bytearray(chance.choice(originals))
        for _ in range(chance.choice((1, 10, 300))):
            content[chance.randrange(len(content) if chance.random() < 0.5 else 200)] = chance.randrange(256)
        path = tmp_path / f"changed-{number}"
        path.write_bytes(content)
        try:
            pieces, seconds = await read(path)
            assert all(0 <= piece.start <= piece.start + piece.seconds <= seconds + 0.03 for piece in pieces)
            outcomes.append("read")
        except RequestError:
            outcomes.append("refused")
    assert set(outcomes) == {"read", "refused"}


@pytest.mark.rounds
async def test_hours_of_sound_take_little_memory(tmp_path: Path):
    path = write_wav(tmp_path / "sound", np.tile(two_tones(), 900))
    async with SoundFile(path, piece_seconds=30, most_seconds=7200) as file:
        child = psutil.Process(file._worker.pid)
        most = 0
        while await file.next() is not None:
            most = max(most, child.memory_info().rss)
        assert file.seconds == pytest.approx(3600, abs=1)
    assert most < 150 * 2**20

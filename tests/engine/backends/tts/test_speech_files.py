"""Audio files as the speech service makes them: other libraries read them, and their pieces join."""

import io
import wave
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import soundfile
from speech_booth import TEXT, Booth, by_ffmpeg

from engine.backends.tts.sound import Encoder
from engine.voices.types import AudioFormat


@pytest.mark.parametrize(("audio_format", "rate"), [("wav", 16000), ("flac", 16000), ("mp3", 16000), ("opus", 48000)])
def test_another_library_reads_what_was_encoded(booth: Booth, audio_format: str, rate: int):
    file, seconds = booth.speak(response_format=audio_format)
    samples, hertz, metadata = by_ffmpeg(file)
    assert hertz == rate
    # MP3 cannot say how much of its first and last frames is padding
    assert len(samples) / rate == pytest.approx(seconds, abs=0.15 if audio_format == "mp3" else 0.001)
    assert soundfile.info(io.BytesIO(file)).samplerate == rate
    assert len(soundfile.read(io.BytesIO(file))[0]) / rate == pytest.approx(seconds, abs=0.15)
    assert "AI-generated" in next(text for key, text in metadata.items() if key.lower() == "comment")
    assert "Hello" not in repr(metadata)


def test_aac_is_a_stream_of_adts_frames(booth: Booth):
    file, seconds = booth.speak(response_format="aac")
    frames, position = 0, 0
    while position < len(file):
        assert file[position : position + 2] == b"\xff\xf1"
        position += int.from_bytes(file[position + 3 : position + 6], "big") >> 5 & 0x1FFF
        frames += 1
    assert position == len(file)
    assert frames * 1024 / 16000 == pytest.approx(seconds, abs=0.2)
    assert by_ffmpeg(file)[1] == 16000


def test_pcm_is_24_khz(booth: Booth):
    file, seconds = booth.speak(response_format="pcm")
    assert len(file) / 2 / 24000 == pytest.approx(seconds, abs=0.001)


def test_a_rate_that_a_format_does_not_know_is_changed(amharic: Path):
    booth = Booth(amharic)
    for audio_format, rate in (("mp3", 22050), ("opus", 48000), ("wav", 22050), ("aac", 22050)):
        file, seconds = booth.speak("selam", speaker=0, language="am", response_format=audio_format)
        samples, hertz, _ = by_ffmpeg(file)
        assert hertz == rate
        assert len(samples) / rate == pytest.approx(seconds, abs=0.2)
    odd = Encoder("mp3", 20000, mark=False).add(np.zeros(20000, np.float32), last=True)
    assert by_ffmpeg(odd)[1] == 22050


@pytest.mark.parametrize("audio_format", get_args(AudioFormat))
def test_pieces_join_without_a_seam(audio_format: Any):
    """A tone that is encoded in pieces is the tone that is encoded at once."""
    rate = 16000
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)).astype(np.float32)
    encoder = Encoder(audio_format, rate, mark=True)
    cut = [tone[:5000], tone[5000:5001], tone[5001:20000], tone[20000:]]
    pieces = [encoder.add(part, last=part is cut[-1]) for part in cut]
    whole = Encoder(audio_format, rate, mark=True).add(tone, last=True)
    if audio_format == "pcm":
        joined, once = (np.frombuffer(data, "<i2").astype(float) for data in (b"".join(pieces), whole))
    else:
        joined, once = (by_ffmpeg(data)[0].astype(float) for data in (b"".join(pieces), whole))
    assert pieces[0] != b""
    assert sum(map(len, pieces[:3])) > len(whole) / 3
    if audio_format == "mp3":
        # Without a table of contents nobody knows the padding: an empty frame in its place, and LAME's delay
        joined = joined[1105:][: len(once)]
    assert len(joined) == len(once)
    middle = slice(len(once) // 8, -len(once) // 8)
    assert np.abs(joined[middle] - once[middle]).max() < 0.02 * np.abs(once).max()


def test_a_file_of_one_piece_says_its_length(booth: Booth):
    for audio_format in ("wav", "flac", "mp3"):
        file, seconds = booth.speak("hello", response_format=audio_format)
        samples, rate = soundfile.read(io.BytesIO(file))
        assert len(samples) / rate == pytest.approx(seconds, abs=0.001)
    file, seconds = booth.speak("hello", response_format="wav")
    with wave.open(io.BytesIO(file)) as opened:
        assert opened.getnframes() / 16000 == pytest.approx(seconds)


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
def test_a_short_text_comes_whole_with_its_length_and_a_long_one_piece_by_piece(booth: Booth, audio_format: str):
    data, seconds = booth.speak(response_format=audio_format)
    assert soundfile.info(io.BytesIO(data)).duration == pytest.approx(seconds, abs=0.01)
    number = booth.submit(TEXT * 20, response_format=audio_format)
    booth.run()
    assert sum(1 for piece in booth.pieces(number) if piece.data) > 10


def test_without_a_mark_a_file_says_nothing(folder: Path):
    booth = Booth(folder, mark=False)
    for audio_format in ("wav", "flac", "mp3", "opus"):
        assert b"AI-generated" not in booth.speak("hello", response_format=audio_format)[0]

"""The service that speaks as its worker runs it, on tiny random voices; what it encodes is read by another library."""

from __future__ import annotations

import io
import os
import shutil
import wave
from typing import TYPE_CHECKING, Any

import av
import msgspec
import numpy as np
import pytest
import soundfile
from recorder import Recorder
from safetensors.torch import load_file, save_file
from tiny_voices import save_vits

from engine import RequestError
from engine.backends import speech_models
from engine.backends.speech_encoders import encoder_for, installed_formats
from engine.backends.speech_models import KEPT_MODELS, Shelf
from engine.backends.speech_service import open_service
from engine.backends.speech_tempo import stretch
from engine.errors import GenerationError, LoadError
from engine.voices.messages import Audio, SpeechEvent, SpeechJob, SpeechOptions, SpeechReady, Spoken
from engine.worker import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine import EngineError

TEXT = "Hello there. It is me! Who else?"


class Booth:
    """A service with its recorder."""

    def __init__(self, folder: Path, *, mark: bool = True) -> None:
        self.folder = folder
        self.recorder = Recorder(SpeechEvent)
        options = msgspec.msgpack.encode(SpeechOptions(threads=1, mark=mark))
        self.service = open_service(options, self.recorder, lambda _phase, _progress: None)
        self.ready = msgspec.msgpack.decode(self.service.info, type=SpeechReady)
        self.numbers = iter(range(1, 1000))

    def submit(self, text: str = TEXT, **more: Any) -> int:
        number = next(self.numbers)
        given = {"folder": str(self.folder), "family": "vits", "speaker": None, "language": "en", "seed": 1, **more}
        self.service.submit(number, msgspec.msgpack.encode(SpeechJob(text=text, **given)))
        return number

    def run(self) -> None:
        while self.service.busy:
            self.service.step()

    def pieces(self, number: int) -> list[Audio]:
        return [event for event in self.recorder.events.get(number, []) if isinstance(event, Audio)]

    def speak(self, text: str = TEXT, **more: Any) -> tuple[bytes, float]:
        """Return the file, and the seconds that the service says it has."""
        number = self.submit(text, **more)
        self.run()
        assert self.recorder.ends[number] is None
        last = self.recorder.events[number][-1]
        assert isinstance(last, Spoken)
        assert last.seconds == pytest.approx(sum(piece.seconds for piece in self.pieces(number)))
        return b"".join(piece.data for piece in self.pieces(number)), last.seconds

    def samples(self, text: str = TEXT, **more: Any) -> np.ndarray:
        return np.frombuffer(self.speak(text, response_format="pcm", **more)[0], "<i2")

    def failure(self, text: str = TEXT, **more: Any) -> EngineError:
        number = self.submit(text, **more)
        self.run()
        error = self.recorder.ends[number]
        assert error is not None
        return error


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """`open_service` sets some of its process's; here that is the tests' own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vits(tmp_path_factory.mktemp("voices") / "tiny")


@pytest.fixture(scope="module")
def amharic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vits(
        tmp_path_factory.mktemp("voices") / "tiny-am", language="amh", is_uroman=True, speakers=2, rate=22050
    )


@pytest.fixture
def booth(folder: Path) -> Booth:
    return Booth(folder)


def by_ffmpeg(data: bytes) -> tuple[np.ndarray, int, dict[str, str]]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(stream)]
        return np.concatenate(frames), stream.rate, {**container.metadata, **stream.metadata}


def test_a_service_says_which_formats_and_families_it_has(booth: Booth):
    assert booth.ready.formats == ["mp3", "opus", "aac", "flac", "wav", "pcm"]
    assert "vits" in booth.ready.families
    assert not booth.service.busy


@pytest.mark.parametrize(("audio_format", "rate"), [("wav", 16000), ("flac", 16000), ("mp3", 16000), ("opus", 48000)])
def test_another_library_reads_what_was_encoded(booth: Booth, audio_format: str, rate: int):
    file, seconds = booth.speak(response_format=audio_format)
    samples, hertz, metadata = by_ffmpeg(file)
    assert hertz == rate
    # MP3 cannot say how much of its first and last frames is padding
    assert len(samples) / rate == pytest.approx(seconds, abs=0.15 if audio_format == "mp3" else 0.001)
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
    odd = encoder_for("mp3", 20000, mark=False).add(np.zeros(20000, np.float32), last=True)
    assert by_ffmpeg(odd)[1] == 22050


@pytest.mark.parametrize("audio_format", installed_formats())
def test_pieces_join_without_a_seam(audio_format: Any):
    """A tone that is encoded in pieces is the tone that is encoded at once."""
    rate = 16000
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)).astype(np.float32)
    encoder = encoder_for(audio_format, rate, mark=True)
    cut = [tone[:5000], tone[5000:5001], tone[5001:20000], tone[20000:]]
    pieces = [encoder.add(part, last=part is cut[-1]) for part in cut]
    whole = encoder_for(audio_format, rate, mark=True).add(tone, last=True)
    if audio_format == "pcm":
        joined, once = (np.frombuffer(data, "<i2").astype(float) for data in (b"".join(pieces), whole))
    else:
        joined, once = (by_ffmpeg(data)[0].astype(float) for data in (b"".join(pieces), whole))
    assert pieces[0] != b""
    assert sum(map(len, pieces[:3])) > len(whole) / 3
    if audio_format == "mp3":
        # Without a table of contents nobody knows the padding: an empty frame in its place, and LAME's delay
        joined = joined[576 + 1105 :][: len(once)]
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


def test_the_first_piece_comes_before_the_rest_is_spoken(booth: Booth):
    number = booth.submit(response_format="mp3")
    booth.service.step()
    assert len(booth.pieces(number)) == 1
    assert booth.pieces(number)[0].data
    assert booth.service.busy
    booth.run()
    assert len(booth.pieces(number)) == 3


def test_texts_are_spoken_in_turn(booth: Booth):
    first, second = booth.submit(), booth.submit("One. Two.")
    for _ in range(3):
        booth.service.step()
    assert (len(booth.pieces(first)), len(booth.pieces(second))) == (2, 1)
    booth.service.step()
    assert booth.recorder.ends == {second: None}
    booth.run()
    assert booth.recorder.ends == {first: None, second: None}


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.5, 2, 3, 4])
def test_speed_divides_the_length(booth: Booth, speed: float):
    natural = booth.speak("Hello there.", response_format="pcm")[1]
    assert booth.speak("Hello there.", response_format="pcm", speed=speed)[1] == pytest.approx(
        natural / speed, rel=0.03
    )


def test_the_same_seed_is_the_same_sound(booth: Booth):
    assert (booth.samples(seed=5) == booth.samples(seed=5)).all()
    alone = booth.samples(seed=5)
    other, mine = booth.submit(seed=9), booth.submit(seed=5, response_format="pcm")
    booth.run()
    assert b"".join(piece.data for piece in booth.pieces(mine)) == alone.tobytes()
    assert booth.recorder.ends[other] is None
    assert not np.array_equal(alone, booth.samples(seed=6))
    assert not np.array_equal(booth.samples(seed=None), booth.samples(seed=None))
    assert booth.samples(seed=-1).size
    assert booth.samples(seed=2**63 - 1).size


def test_speakers_of_a_model_differ(amharic: Path):
    booth = Booth(amharic)
    first, second = (booth.samples("selam", speaker=number, language="am") for number in (0, 1))
    assert not np.array_equal(first, second)
    assert isinstance(booth.failure("selam", speaker=2, language="am"), GenerationError)


def test_digits_and_ethiopic_letters_are_spoken(booth: Booth, amharic: Path):
    spoken = booth.samples("42")
    assert (spoken == booth.samples("forty-two")).all()
    other = Booth(amharic)
    assert (
        other.samples("ሰላም 42", speaker=0, language="am") == other.samples("ሰላም አርባ ሁለት", speaker=0, language="am")
    ).all()


def test_words_stay_apart_where_signs_are_left_out(booth: Booth):
    assert (booth.samples("here/there—now") == booth.samples("here there-now")).all()
    assert (booth.samples("Café NOËL") == booth.samples("cafe noel")).all()


@pytest.mark.parametrize("text", ["😀🎉", "...", "ሰላም", "   ", "-"])
def test_a_text_without_letters_of_the_voice_is_refused_with_its_language(booth: Booth, text: str):
    try:
        error = booth.failure(text)
    except RequestError as refused:
        error = refused
    assert isinstance(error, RequestError)
    assert error.param == "input"
    assert "English" in error.message


def test_letters_of_other_scripts_are_no_letters_of_a_romanised_voice(amharic: Path):
    booth = Booth(amharic)
    for text in ("مرحبا שלום", "你好世界", "\ufdfa" * 4096):
        assert "Amharic" in booth.failure(text, language="am", speaker=0).message


def test_a_sentence_without_letters_is_left_out(booth: Booth):
    number = booth.submit("Hello. 😀! Goodbye.")
    booth.run()
    assert len(booth.pieces(number)) == 2


def test_a_speed_out_of_range_is_refused(booth: Booth):
    for speed in (0.2, 4.1, float("nan")):
        with pytest.raises(RequestError) as refused:
            booth.submit(speed=speed)
        assert refused.value.param == "speed"


def test_a_cancelled_text_is_spoken_no_further(booth: Booth):
    number, other = booth.submit(), booth.submit("One.")
    booth.service.step()
    booth.service.cancel(number)
    booth.service.cancel(number)
    booth.run()
    assert len(booth.pieces(number)) == 1
    assert booth.recorder.ends == {number: None, other: None}


def test_a_voice_that_cannot_be_loaded_fails_its_text_only(booth: Booth, tmp_path: Path):
    broken = booth.submit(folder=str(tmp_path / "gone"))
    unknown = booth.submit(family="parrot")
    fine = booth.submit("One.")
    booth.run()
    assert isinstance(booth.recorder.ends[broken], GenerationError)
    assert isinstance(booth.recorder.ends[unknown], GenerationError)
    assert booth.recorder.ends[fine] is None


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_voice_that_makes_noise_of_no_number_fails(booth: Booth, tmp_path: Path):
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["decoder.conv_post.weight"][:] = float("nan")

    error = booth.failure(folder=str(changed(booth.folder, tmp_path / "nan", spoil)))
    assert isinstance(error, GenerationError)


def test_a_model_that_lacks_weights_is_not_filled_with_noise(folder: Path, tmp_path: Path):
    lacking = changed(folder, tmp_path / "lacking", lambda tensors: tensors.pop("decoder.conv_post.weight"))
    with pytest.raises(LoadError, match=r"decoder\.conv_post\.weight"):
        Shelf().take("vits", str(lacking))

    def drop_training(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("posterior_encoder.")]:
            del tensors[name]

    assert Shelf().take("vits", str(changed(folder, tmp_path / "lean", drop_training))).sample_rate == 16000


def test_older_names_of_weights_are_read(booth: Booth, tmp_path: Path):
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if ".parametrizations.weight.original" in name:
                stem, _, number = name.partition(".parametrizations.weight.original")
                tensors[f"{stem}.weight_{'gv'[int(number)]}"] = tensors.pop(name)

    older = changed(booth.folder, tmp_path / "older", rename)
    assert (booth.samples(folder=str(older)) == booth.samples()).all()


def test_a_model_in_pickles_is_refused(folder: Path, tmp_path: Path):
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(LoadError, match="safetensors"):
        Shelf().take("vits", str(pickled))


def test_the_models_that_were_used_last_stay_loaded(folder: Path, tmp_path: Path):
    shelf = Shelf()
    folders = [str(shutil.copytree(folder, tmp_path / str(number))) for number in range(KEPT_MODELS + 1)]
    loaded = [shelf.take("vits", name) for name in folders[:-1]]
    assert shelf.take("vits", folders[0]) is loaded[0]
    shelf.take("vits", folders[-1])
    assert shelf.take("vits", folders[0]) is loaded[0]
    assert shelf.take("vits", folders[1]) is not loaded[1]
    os.utime(tmp_path / "0" / "config.json", ns=(1, 2**62))
    assert shelf.take("vits", folders[0]) is not loaded[0]


@pytest.mark.parametrize("family", ["piper", "kokoro"])
def test_a_family_whose_package_is_missing_says_which(family: str, tmp_path: Path):
    if family in speech_models.installed_families():
        pytest.skip(f"{family} is installed")
    with pytest.raises(LoadError, match="pip install"):
        Shelf().take(family, str(tmp_path))


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.3, 2, 4])
def test_stretching_keeps_the_pitch(speed: float):
    rate = 22050
    tone = np.sin(2 * np.pi * 220 * np.arange(2 * rate) / rate).astype(np.float32)
    made = stretch(tone, rate, speed)
    assert len(made) == round(len(tone) / speed)
    heard = np.abs(np.fft.rfft(made * np.hanning(len(made))))
    assert np.argmax(heard) * rate / len(made) == pytest.approx(220, abs=220 * 0.02)
    assert np.abs(made[rate // 10 : -rate // 10]).max() == pytest.approx(1, abs=0.1)


async def test_a_worker_process_speaks(folder: Path):
    worker = await WorkerProcess.start(
        "engine.backends.speech_service:open_service",
        msgspec.msgpack.encode(SpeechOptions(threads=1, mark=True)),
        lambda _phase, _progress: None,
        environment={"OMP_NUM_THREADS": "1"},
    )
    try:
        job = SpeechJob(str(folder), "vits", None, "en", TEXT, seed=1, response_format="flac")
        events = [
            msgspec.msgpack.decode(event, type=SpeechEvent) async for event in worker.run(msgspec.msgpack.encode(job))
        ]
        with pytest.raises(RequestError) as refused:
            async for _ in worker.run(msgspec.msgpack.encode(msgspec.structs.replace(job, text="😀"))):
                pass
    finally:
        await worker.shutdown()
    assert refused.value.param == "input"
    assert isinstance(events[-1], Spoken)
    samples, rate, _ = by_ffmpeg(b"".join(event.data for event in events if isinstance(event, Audio)))
    assert len(samples) / rate == pytest.approx(events[-1].seconds, abs=0.001)

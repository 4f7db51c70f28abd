"""The service that speaks as its worker runs it, on tiny random voices."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from speech_booth import TEXT, Booth, by_ffmpeg

from engine import RequestError
from engine.backends.tts.service import MAX_LOADED, loaded
from engine.backends.tts.sound import stretch
from engine.errors import GenerationError, LoadError
from engine.process.parent import WorkerProcess
from engine.voices.readers import is_installed
from engine.voices.types import SpeechChunk, SpeechJob


def test_the_first_piece_comes_before_the_rest_is_spoken(booth: Booth):
    number = booth.submit(response_format="mp3")
    booth.service.step()
    assert len(booth.pieces(number)) == 1
    assert booth.pieces(number)[0].data
    assert booth.service.busy
    booth.run()
    assert len(booth.pieces(number)) > 3
    assert all(piece.seconds <= 0.5 for piece in booth.pieces(number))


def test_texts_are_spoken_in_turn(booth: Booth):
    first, second = booth.submit(), booth.submit("One. Two.")
    for _ in range(3):
        booth.service.step()
    assert (len(booth.pieces(first)), len(booth.pieces(second))) == (2, 1)
    while booth.recorder.ends != {second: None}:
        booth.service.step()
    assert abs(len(booth.pieces(first)) - len(booth.pieces(second))) <= 1
    booth.run()
    assert booth.recorder.ends == {first: None, second: None}


def test_every_text_begins_before_another_goes_on_that_is_ahead_of_its_listener(booth: Booth):
    page = booth.submit("One sentence of many words that are spoken here. " * 20)
    for _ in range(4):
        booth.service.step()
    late = [booth.submit("Two. Three.") for _ in range(50)]
    for _ in late:
        booth.service.step()
    assert [len(booth.pieces(number)) for number in (page, *late)] == [4, *[1] * 50]
    for number in (page, *late):
        booth.service.cancel(number)
    assert not booth.service.busy


def test_when_nobody_runs_out_of_sound_the_oldest_text_is_finished(booth: Booth):
    pages = [booth.submit("One sentence of many words that are spoken here. " * 60) for _ in range(3)]
    heard_to_the_end = booth.recorder.ends
    while not heard_to_the_end:
        booth.service.step()
    assert heard_to_the_end == {pages[0]: None}
    whole, *ahead = (sum(piece.seconds for piece in booth.pieces(number)) for number in pages)
    assert all(9 < seconds < whole - 9 for seconds in ahead), (whole, ahead)
    for number in pages:
        booth.service.cancel(number)


def test_owners_take_turns_however_many_texts_each_has(booth: Booth):
    many = [booth.submit("One. Two. Three.", owner="a") for _ in range(20)]
    for _ in range(5):
        booth.service.step()
    one = booth.submit("One sentence of many words that are spoken here. " * 4, owner="b")
    for _ in range(10):
        booth.service.step()
    assert len(booth.pieces(one)) == 5
    assert sum(len(booth.pieces(number)) for number in many) == 10
    booth.run()
    assert booth.recorder.ends == dict.fromkeys((*many, one))


def test_a_text_is_given_up_after_its_own_seconds_whatever_others_take(booth: Booth):
    patient = booth.submit("One sentence of many words that are spoken here. " * 20)
    hasty = booth.submit("One sentence of many words that are spoken here. " * 20, max_seconds=1e-9)
    fast = booth.submit("Hello.", max_seconds=1e-9)
    booth.run()
    failure = booth.recorder.ends.pop(hasty)
    assert isinstance(failure, GenerationError)
    assert "longer than 1e-09 s" in failure.message
    assert booth.recorder.ends == {patient: None, fast: None}, "what is complete is not given up"


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


def test_a_text_that_the_romaniser_fails_at_ends_alone(amharic: Path):
    booth = Booth(amharic)
    other = booth.submit("ሰላም። ሰላም።", language="am", speaker=0)
    assert isinstance(booth.failure("\u280c\u3007", language="am", speaker=0), GenerationError)
    assert booth.recorder.ends[other] is None


def test_a_sentence_without_letters_is_left_out(booth: Booth):
    assert np.array_equal(booth.samples("Hello. 😀! Goodbye."), booth.samples("Hello. Goodbye."))


def test_a_number_of_thousands_of_figures_is_spoken(booth: Booth):
    number = booth.submit("One. " + "㉑" * 2200)
    booth.service.step()
    assert booth.pieces(number)
    booth.service.cancel(number)


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
        loaded("vits", lacking)

    def drop_training(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("posterior_encoder.")]:
            del tensors[name]

    assert loaded("vits", changed(folder, tmp_path / "lean", drop_training)).sample_rate == 16000


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
        loaded("vits", pickled)


def test_the_models_that_were_used_last_stay_loaded(folder: Path, tmp_path: Path):
    folders = [shutil.copytree(folder, tmp_path / str(number)) for number in range(MAX_LOADED + 1)]
    models = [loaded("vits", name) for name in folders[:-1]]
    assert loaded("vits", folders[0]) is models[0]
    loaded("vits", folders[-1])
    assert loaded("vits", folders[0]) is models[0]
    assert loaded("vits", folders[1]) is not models[1]
    os.utime(tmp_path / "0" / "config.json", ns=(1, 2**62))
    assert loaded("vits", folders[0]) is not models[0]


@pytest.mark.skipif(is_installed("piper"), reason="piper is installed")
def test_a_family_whose_package_is_missing_says_which(tmp_path: Path):
    with pytest.raises(LoadError, match="pip install"):
        loaded("piper", tmp_path)


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.3, 2, 4])
def test_stretching_keeps_the_pitch(speed: float):
    rate = 22050
    tone = np.sin(2 * np.pi * 220 * np.arange(2 * rate) / rate).astype(np.float32)
    made = stretch([tone[:rate], tone[rate:]], rate, speed)
    assert len(made) == round(len(tone) / speed)
    heard = np.abs(np.fft.rfft(made * np.hanning(len(made))))
    assert np.argmax(heard) * rate / len(made) == pytest.approx(220, abs=220 * 0.02)
    assert np.abs(made[rate // 10 : -rate // 10]).max() == pytest.approx(1, abs=0.1)


async def test_a_worker_process_speaks(folder: Path):
    worker = await WorkerProcess.start(
        "engine.backends.tts.service:open_service",
        (True, ["vits"]),
        lambda _phase, _progress: None,
        environment={"OMP_NUM_THREADS": "1"},
    )
    try:
        job = SpeechJob(str(folder), "vits", None, "en", TEXT, seed=1, response_format="flac")
        events: list[SpeechChunk] = []
        await worker.run(job, lambda event: events.append(msgspec.msgpack.decode(event, type=SpeechChunk)))
        with pytest.raises(RequestError) as refused:
            await worker.run(msgspec.structs.replace(job, text="😀"), events.append)
    finally:
        await worker.shutdown()
    assert refused.value.param == "input"
    samples, rate, _ = by_ffmpeg(b"".join(event.data for event in events))
    assert len(samples) / rate == pytest.approx(sum(event.seconds for event in events), abs=0.001)

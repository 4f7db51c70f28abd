"""The voices of eSpeak NG as they sound: alike every time, equally loud, women above men, quick, and of their letters."""

import gc
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from espeak_parts import NINE, TEXTS, pitch_hz, spoken
from speech_booth import Booth, by_ffmpeg

from engine.backends.tts.service import loaded
from engine.backends.tts.sound import loudness_lufs
from engine.errors import GenerationError, LoadError, RequestError
from engine.voices.catalogue import SHIPPED

pytest.importorskip("espeakng_loader", reason="set up with --no-espeak")


@pytest.mark.parametrize("voice", NINE)
def test_a_voice_is_as_loud_as_the_others_on_every_text(voice: str):
    for text in TEXTS[NINE[voice][1]]:
        rate, samples = spoken(voice, text)
        assert loudness_lufs(samples, rate) == pytest.approx(-20, abs=2), text
        assert np.abs(samples).max() < 1


def test_women_speak_higher_than_men_and_every_voice_of_a_language_otherwise():
    pitch = {name: pitch_hz(*spoken(name, TEXTS[language][0])) for name, (_, language) in NINE.items()}
    women = {name: hertz for name, hertz in pitch.items() if NINE[name][0] == "female"}
    men = {name: hertz for name, hertz in pitch.items() if NINE[name][0] == "male"}
    assert min(women.values()) > 165
    assert max(women.values()) < 270
    assert min(men.values()) > 75
    assert max(men.values()) < 150
    assert women["hana"] > 1.1 * women["selam"]


def test_the_same_text_is_the_same_sound_whatever_was_said_before():
    first = spoken("emma", "Good morning.")[1]
    for other in ("selam", "hana", "warsame"):  # two of these have a speed of their own
        spoken(other, TEXTS[NINE[other][1]][0])
        assert np.array_equal(first, spoken("emma", "Good morning.")[1]), other


@pytest.mark.parametrize("speed", [0.25, 0.5, 2, 4])
def test_speed_is_kept_to_a_sample(speed: float):
    plain = len(spoken("james", "It speaks at this speed.")[1])
    assert len(spoken("james", "It speaks at this speed.", speed=speed)[1]) == round(plain / speed)


def test_one_core_speaks_fifty_times_faster_than_a_listener_hears():
    booth = Booth(SHIPPED / "espeak-am")
    text = " ".join(TEXTS["am"]) * 10
    voice = {"family": "espeak", "speaker": "selam", "language": "am", "response_format": "mp3"}
    booth.speak(text[:20], **voice)
    began = time.process_time()
    _, seconds = booth.speak(text, **voice)
    assert seconds > 60
    assert (time.process_time() - began) / seconds <= 0.02


def test_the_first_sound_of_a_page_of_text_comes_at_once():
    text = (" ".join(TEXTS["en"]) * 30)[:4096]
    booth = Booth(SHIPPED / "espeak-en")
    booth.speak("Hello.", family="espeak", speaker="emma")
    number = booth.submit(text, family="espeak", speaker="emma")
    began = time.process_time()
    while not any(piece.data for piece in booth.pieces(number)):
        booth.service.step()
    assert time.process_time() - began < 0.05


def test_letters_of_other_scripts_are_not_read_out_by_their_names():
    booth = Booth(SHIPPED / "espeak-so")
    voice = {"family": "espeak", "speaker": "hodan", "language": "so"}
    assert len(booth.samples("Subax мир wanaagsan.", **voice)) < 1.2 * len(booth.samples("Subax wanaagsan.", **voice))
    error = booth.failure("Доброе утро. 早上好。", **voice)
    assert isinstance(error, RequestError)
    assert error.param == "input"


@pytest.mark.parametrize(("language", "voice"), [("so", "hodan"), ("om", "tolosa")])
def test_a_letter_without_a_sound_of_its_own_is_refused(language: str, voice: str):
    failure = Booth(SHIPPED / f"espeak-{language}").failure("\u02bc", family="espeak", speaker=voice, language=language)
    assert isinstance(failure, RequestError)


def test_what_looks_like_markup_or_phonemes_is_only_text():
    booth = Booth(SHIPPED / "espeak-en")
    for text in (
        "[[h@l'oU]] there",
        '<audio src="file:///etc/passwd">x</audio> there',
        "<voice name='so'>there</voice>",
    ):
        samples, rate, _ = by_ffmpeg(booth.speak(text, family="espeak", speaker="emma", response_format="wav")[0])
        assert len(samples) / rate > 0.5


def test_memory_does_not_grow_with_what_was_spoken():
    def rss_bytes() -> int:
        """Now, not at most: other tests of this process have had more."""
        gc.collect()
        return psutil.Process().memory_info().rss

    for number in range(100):
        spoken("emma" if number % 2 else "selam", f"Good morning number {number}.")
    before = rss_bytes()
    for number in range(400):
        spoken("emma" if number % 2 else "selam", f"Good morning number {number}.")
    assert rss_bytes() - before < 4 << 20, "10 KiB a text"


def test_a_folder_that_cannot_speak_says_why(tmp_path: Path):
    for number, (config, complaint) in enumerate(
        [
            ("{}", "names no language"),
            ('{"language": "tlh"}', "does not speak tlh"),
            ("[", "cannot be read as JSON"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(config)
        with pytest.raises(LoadError, match=complaint):
            loaded("espeak", folder)
        assert isinstance(Booth(folder).failure(family="espeak", speaker="x"), GenerationError)
    with pytest.raises(LoadError, match="there is no voices/nobody"):
        loaded("espeak", SHIPPED / "espeak-en").speak("x", "nobody", 1, 0)


def test_loudness_is_that_of_the_norm():
    """A sine of 997 Hz at full scale in one channel has -3.01 LUFS (ITU-R BS.1770-5, annex 1)."""
    for rate in (16_000, 22_050, 24_000, 48_000):
        sine = np.sin(2 * np.pi * 997 * np.arange(3 * rate) / rate).astype(np.float32)
        for samples in (sine, np.concatenate([sine, np.zeros(5 * rate, np.float32)])):  # silence does not count
            assert loudness_lufs(samples, rate) == pytest.approx(-3.01, abs=0.3)
        assert loudness_lufs(sine[: rate // 20], rate) < -10
        assert loudness_lufs(np.zeros(100, np.float32), rate) == -70

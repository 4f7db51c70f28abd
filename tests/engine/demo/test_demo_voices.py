"""The demo voices keep their promises, in the hands of transformers: pitch, time, seeds, and no clicks.

What the speech service makes of them is tested beside the service.
"""

import json
import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml
from demo_models.build import RECIPES
from manifest_parts import problems
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from engine.demo import weights_dir
from engine.weights.safety import check_folder

RATE = 16000
TEXTS = {
    "demo-am": "ሰላም፣ እንዴት ነህ? ዛሬ ጥሩ ቀን ነው።",
    "demo-so": "Subax wanaagsan, sidee tahay maanta?",
    "demo-ti": "ሰላም፣ ከመይ ኣለኻ? ሎሚ ጽቡቕ መዓልቲ እዩ።",
    "demo-om": "Akkam jirtu? Har'a guyyaa gaarii dha.",
    "demo-en": "Good morning. The quick brown fox jumps over the lazy dog.",
}
VOICES = {
    "demo-am": {"selam": "female", "hana": "female", "dawit": "male"},
    "demo-so": {"hodan": "female", "warsame": "male"},
    "demo-ti": {"berhane": "male"},
    "demo-om": {"tolosa": "male"},
    "demo-en": {"emma": "female", "james": "male"},
}
LANGUAGES = {"demo-am": "amh", "demo-so": "som", "demo-ti": "tir", "demo-om": "orm", "demo-en": "eng"}
EVERYBODY = [(folder, speaker) for folder, voices in VOICES.items() for speaker in range(len(voices))]


@pytest.fixture(scope="module")
def models():
    import torch
    from transformers import VitsModel, VitsTokenizer

    torch.set_num_threads(1)
    folders = {name: weights_dir("voices") / name for name in VOICES}
    return {
        name: (VitsModel.from_pretrained(folder).eval(), VitsTokenizer.from_pretrained(folder))
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def say(models):
    import torch
    import uroman

    romaniser = uroman.Uroman()

    def said(folder: str, text: str, speaker: int = 0, *, seed: int = 0, speed: float = 1.0) -> np.ndarray:
        model, tokenizer = models[folder]
        if not text.isascii():
            text = romaniser.romanize_string(text)
        model.speaking_rate = speed
        torch.manual_seed(seed)
        with torch.inference_mode():
            wave = model(**tokenizer(text, return_tensors="pt"), speaker_id=speaker).waveform
        return wave[0].numpy()

    return said


@pytest.fixture(scope="module")
def spoken(say):
    return {(folder, speaker): say(folder, TEXTS[folder], speaker) for folder, speaker in EVERYBODY}


# The measure of pitch, by autocorrelation.
WINDOW_SECONDS = 0.05
LOWEST_HZ, HIGHEST_HZ = 70, 400
# Beside the loudest window: what is quieter is a pause or a fading.
SMALLEST_LOUDNESS = 0.2
# Of the best correlation: two periods later a sound is as much like itself as one period later, so the first counts.
NEARLY_BEST = 0.9


def pitches_hz(wave: NDArray[np.floating], sample_rate: int) -> NDArray[np.float64]:
    """The pitch of every window that is loud enough, in hertz; empty for silence. `wave` is (samples,)."""
    length = int(WINDOW_SECONDS * sample_rate)
    starts = range(0, len(wave) - 2 * length + 1, length // 2)
    loudness = np.array([np.sqrt(np.mean(np.square(wave[start : start + length]))) for start in starts])
    loud = loudness > SMALLEST_LOUDNESS * loudness.max(initial=0)
    found = (
        _pitch_hz(wave[start : start + 2 * length].astype(np.float64), sample_rate)
        for start, is_loud in zip(starts, loud, strict=True)
        if is_loud
    )
    return np.array([pitch for pitch in found if pitch is not None])


def median_pitch_hz(wave: NDArray[np.floating], sample_rate: int) -> float:
    """The pitch in the middle of all that are measured. Raises ValueError where there is none to measure."""
    found = pitches_hz(wave, sample_rate)
    if not found.size:
        raise ValueError("This sound has no pitch: it is silent, noise, or shorter than a tenth of a second.")
    return float(np.median(found))


def _pitch_hz(piece: NDArray[np.float64], sample_rate: int) -> float | None:
    half = len(piece) // 2
    first = piece[:half] - piece[:half].mean()
    lags = np.arange(int(sample_rate / HIGHEST_HZ) - 1, int(sample_rate / LOWEST_HZ) + 2)
    later = sliding_window_view(piece, half)[lags]
    later = later - later.mean(axis=1, keepdims=True)
    sizes = np.sqrt((first @ first) * np.square(later).sum(axis=1))
    alike = (later @ first) / np.where(sizes > 0, sizes, 1.0)
    inner = alike[1:-1]
    peaks = np.flatnonzero((inner >= alike[:-2]) & (inner > alike[2:]) & (inner > 0.3))
    if not peaks.size:
        return None
    best = peaks[inner[peaks] >= NEARLY_BEST * inner[peaks].max()][0]
    return float(sample_rate / lags[1 + best])


def loudness(wave: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(wave))))


def colour(wave: np.ndarray) -> np.ndarray:
    """How the loudness is spread over the frequencies, whatever the phase."""
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave))))
    return spectrum / np.linalg.norm(spectrum)


def clicks(wave: np.ndarray) -> float:
    """The loudest 16 ms above 5 kHz, where the voices have no tones but every jump is heard, beside the loudest of all."""
    pieces = np.lib.stride_tricks.sliding_window_view(wave, 256)[::64] * np.hanning(256)
    spectra = np.abs(np.fft.rfft(pieces, axis=1))
    high = spectra[:, 256 * 5000 // RATE :]
    return float(np.linalg.norm(high, axis=1).max() / np.linalg.norm(spectra, axis=1).max())


def test_the_measure_of_clicks_hears_a_jump():
    tone = 0.5 * np.sin(2 * np.pi * 200 * np.arange(RATE) / RATE)
    assert clicks(tone) < 1e-3
    tone[RATE // 2 :] = 0.5 * np.cos(2 * np.pi * 200 * np.arange(RATE // 2) / RATE)
    assert clicks(tone) > 0.03


def test_the_weights_fit_the_recipe_that_is_in_the_repository():
    assert problems("voices") == []


@pytest.mark.parametrize("name", ["voices/cast.yaml", "voices/sounds.yaml", "voices/recipe.py", "training.py"])
def test_a_recipe_that_changed_after_the_training_is_noticed(tmp_path: Path, name: str):
    recipes = shutil.copytree(RECIPES, tmp_path / "recipes")
    (recipes / name).write_text((recipes / name).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    (problem,) = problems("voices", recipes)
    assert "voices changed" in problem


def test_weights_of_one_voice_that_were_altered_are_noticed(tmp_path: Path):
    weights = shutil.copytree(weights_dir("voices"), tmp_path / "voices")
    with (weights / "demo-so" / "voices.yaml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    (problem,) = problems("voices", weights=tmp_path)
    assert "voices/demo-so/voices.yaml was altered" in problem


def test_the_folders_are_small_and_hold_no_code():
    files = [path for path in weights_dir("voices").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3 * 2**20
    assert {path.suffix for path in files} == {".json", ".safetensors", ".yaml"}


@pytest.mark.parametrize("folder", VOICES)
def test_a_folder_is_what_an_mms_voice_is(folder: str):
    path = weights_dir("voices") / folder
    check_folder(path)
    config = json.loads((path / "config.json").read_text("utf-8"))
    assert config["model_type"] == "vits"
    assert config["num_speakers"] == len(VOICES[folder])
    assert config["sampling_rate"] == RATE
    tokenizer = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    assert tokenizer["language"] == LANGUAGES[folder]
    assert tokenizer["is_uroman"] == (folder in {"demo-am", "demo-ti"})
    assert not tokenizer["phonemize"]


@pytest.mark.parametrize("folder", VOICES)
def test_the_overlay_names_every_speaker_and_says_that_it_is_a_demo(folder: str):
    overlay = yaml.safe_load((weights_dir("voices") / folder / "voices.yaml").read_text("utf-8"))
    assert overlay["demo"] is True
    assert overlay["licence"] == "Apache-2.0"
    assert overlay["consent"] == "synthetic, no human speaker"
    assert {voice["id"]: voice["gender"] for voice in overlay["voices"]} == VOICES[folder]
    numbers = [None] if len(VOICES[folder]) == 1 else list(range(len(VOICES[folder])))
    assert [voice["speaker"] for voice in overlay["voices"]] == numbers
    assert all(voice["name"] == voice["id"].capitalize() for voice in overlay["voices"])
    assert all(
        "demo" in voice["description"] and voice["gender"] in voice["description"] for voice in overlay["voices"]
    )


@pytest.mark.parametrize("hertz", [90, 125, 187.5, 250, 333])
def test_the_measure_of_pitch_finds_the_pitch_of_a_tone_with_harmonics(hertz: float):
    seconds = np.arange(RATE) / RATE
    tone = sum(np.sin(2 * np.pi * number * hertz * seconds + number) / number for number in range(1, 9))
    assert median_pitch_hz(np.asarray(tone), RATE) == pytest.approx(hertz, rel=0.02)


def test_the_measure_of_pitch_finds_none_in_silence_and_says_so():
    assert pitches_hz(np.zeros(RATE), RATE).size == 0
    with pytest.raises(ValueError, match="no pitch"):
        median_pitch_hz(np.zeros(RATE), RATE)


@pytest.mark.parametrize(("folder", "speaker"), EVERYBODY)
def test_a_voice_speaks_its_language_loudly_enough_and_without_clicks(spoken, folder: str, speaker: int):
    wave = spoken[folder, speaker]
    assert len(wave) > RATE
    assert 0.35 <= np.abs(wave).max() <= 0.65
    assert loudness(wave) > 0.05
    assert abs(wave.mean()) < 0.01
    assert np.abs(wave[:80]).max() < 0.02
    assert np.abs(wave[-80:]).max() < 0.02
    assert clicks(wave) < 0.02


@pytest.mark.parametrize(("folder", "speaker"), EVERYBODY)
def test_a_voice_keeps_its_pitch(spoken, folder: str, speaker: int):
    found = pitches_hz(spoken[folder, speaker], RATE)
    near = np.abs(found / np.median(found) - 1) < 0.03
    assert near.mean() > 0.9


def test_women_speak_higher_than_men(spoken):
    pitch = {
        voice: median_pitch_hz(spoken[folder, number], RATE)
        for folder, voices in VOICES.items()
        for number, voice in enumerate(voices)
    }
    genders = {voice: gender for voices in VOICES.values() for voice, gender in voices.items()}
    assert all(165 <= pitch[voice] <= 270 for voice, gender in genders.items() if gender == "female")
    assert all(85 <= pitch[voice] <= 160 for voice, gender in genders.items() if gender == "male")
    for voices in VOICES.values():
        for one, other in combinations(voices, 2):
            ratio = max(pitch[one], pitch[other]) / min(pitch[one], pitch[other])
            assert ratio > (1.15 if genders[one] == genders[other] else 1.5)


def test_every_letter_lasts_the_same_time_and_a_space_is_a_short_silence(say):
    ends = len(say("demo-en", "a" * 2)) - 2 * (len(say("demo-en", "aa")) - len(say("demo-en", "a")))
    letter = len(say("demo-en", "aa")) - len(say("demo-en", "a"))
    assert 0.05 * RATE < letter < 0.12 * RATE
    for text in ("abcdefghijklm", "nopqrstuvwxyz", "a'eiouaeiouae"):
        assert len(say("demo-en", text)) == 13 * letter + ends
    whole = say("demo-en", "aaaaa aaaaa")
    space = len(whole) - 10 * letter - ends
    assert letter < space < 0.2 * RATE
    middle = len(whole) // 2
    assert loudness(whole[middle - space // 6 : middle + space // 6]) < 0.02
    assert loudness(whole) > 0.1


@pytest.mark.parametrize("folder", VOICES)
def test_a_longer_text_takes_longer_in_proportion(say, folder: str):
    once, thrice = len(say(folder, TEXTS[folder])), len(say(folder, " ".join([TEXTS[folder]] * 3)))
    assert 2.9 < thrice / once < 3.2


@pytest.mark.parametrize(("folder", "speaker"), EVERYBODY)
def test_the_same_seed_says_the_same_and_another_seed_nearly_the_same(say, folder: str, speaker: int):
    one, again, other = (say(folder, "salaam selam", speaker, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert one.shape == other.shape
    assert not np.array_equal(one, other)
    assert loudness(one - other) < 0.5 * loudness(one)


@pytest.mark.parametrize("folder", VOICES)
def test_the_speaking_rate_changes_the_length_and_not_the_pitch(say, folder: str):
    normal = say(folder, TEXTS[folder])
    for speed in (0.25, 0.5, 1.5, 2.0, 4.0):
        wave = say(folder, TEXTS[folder], speed=speed)
        assert len(wave) / len(normal) == pytest.approx(1 / speed, rel=0.35)
        assert median_pitch_hz(wave, RATE) == pytest.approx(median_pitch_hz(normal, RATE), rel=0.02)
    lengths = [len(say(folder, TEXTS[folder], speed=speed)) for speed in (0.5, 0.8, 1.0, 1.3, 2.0, 3.0, 5.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) >= 6

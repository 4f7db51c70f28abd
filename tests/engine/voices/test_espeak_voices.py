"""The voices of eSpeak NG that come with Hearth, and what voice files in a folder of one's own may say."""

import sys
from pathlib import Path

import pytest
from speech_parts import NINE
from voice_folders import OTHER, ids, install, only_warning, overlay, put, read, vits

from engine.demo import weights_dir
from engine.voices.catalogue import SHIPPED, Catalogue, read_catalogue


def as_shipped(weights: Path) -> Catalogue:
    return read_catalogue(weights, weights_dir("voices"), SHIPPED)


def espeak(root: Path, *lines: str, name: str = "olga", **config: object) -> Path:
    folder = root / "mine"
    put(folder, "config.json", {"model_type": "espeak-ng", "language": "ru", "license": "GPL-3.0-or-later"} | config)
    put(folder, f"voices/{name}", "\n".join(("name Olga", "language variant", "gender female", *lines, "")))
    return folder


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "espeakng_loader")


@pytest.mark.usefixtures("installed")
def test_as_shipped_the_nine_voices_of_the_interface_say_words(tmp_path: Path):
    catalogue = as_shipped(tmp_path / "none")
    assert {voice.id: (voice.gender, voice.language) for voice in catalogue.voices} == NINE
    assert catalogue.warnings == ()
    assert not catalogue.only_demos
    told = {(voice.family, voice.quality, voice.licence, voice.available, voice.demo) for voice in catalogue.voices}
    assert told == {("espeak", "formant", "GPL-3.0-or-later", True, False)}
    assert all(voice.name == voice.id.capitalize() for voice in catalogue.voices)


def test_without_espeak_the_tones_come_back_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    catalogue = as_shipped(tmp_path / "none")
    assert {voice.id: (voice.gender, voice.language) for voice in catalogue.voices} == NINE
    assert {(voice.family, voice.quality, voice.demo) for voice in catalogue.voices} == {("vits", "tones", True)}
    assert catalogue.warnings == ()


@pytest.mark.usefixtures("installed")
def test_a_voice_of_ones_own_takes_the_place_of_a_shipped_one(tmp_path: Path):
    overlay(vits(tmp_path / "voices", "real"), {"id": "selam", "name": "Selam", "gender": "female"})
    catalogue = as_shipped(tmp_path / "voices")
    assert sorted(ids(catalogue)) == sorted(NINE)
    found = catalogue.find("selam")
    assert found is not None
    assert (found.family, found.quality) == ("vits", "neural")


@pytest.mark.usefixtures("installed")
def test_voice_files_in_a_folder_make_voices_of_any_language(tmp_path: Path):
    espeak(
        tmp_path / "voices", "pitch 180 240", "formant 1 110 80 150 -20 // brighter", "stressAdd 0 0 -10 -10 0 0 10 40"
    )
    (voice,) = read(tmp_path / "voices").voices
    assert (voice.id, voice.name, voice.gender, voice.language) == ("olga", "Olga", "female", "ru")
    assert (voice.sample_rate, voice.speaker, voice.licence) == (22050, "olga", "GPL-3.0-or-later")
    overlay(tmp_path / "voices" / "mine", OTHER | {"speaker": "olga"})
    assert ids(read(tmp_path / "voices")) == ["abebe"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("pitch 180", "line 4: pitch takes 2 whole numbers from 30 to 500"),
        ("pitch 180 99999999", "line 4: pitch takes"),
        ("formant 1 110 80 150 -20 5", "line 4: formant takes 2 to 5 whole numbers"),
        ("tone 600 nan", "line 4: tone takes"),
        ("dictionary ../../secret", "line 4: the key dictionary is not read here"),
        ("mbrola en1 en1_phtrans", "line 4: the key mbrola is not read here"),
    ],
)
def test_a_voice_file_with_a_mistake_cannot_speak_and_says_why(tmp_path: Path, line: str, complaint: str):
    folder = espeak(tmp_path / "voices", line)
    overlay(folder, {"speaker": "olga", "name": "Olga", "gender": "female"})
    catalogue = read(tmp_path / "voices")
    assert [voice.available for voice in catalogue.voices] == [False]
    assert complaint in only_warning(catalogue)


def test_a_voice_file_that_is_none_is_no_voice(tmp_path: Path):
    folder = espeak(tmp_path / "voices")
    put(folder, "voices/olga", b"x" * 5000)
    overlay(folder, {"speaker": "olga", "name": "Olga", "gender": "female"})
    assert any("larger than 4 KiB" in warning.message for warning in read(tmp_path / "voices").warnings)


def test_a_folder_that_names_no_language_hides_its_voices(tmp_path: Path):
    espeak(tmp_path / "voices", language="nonsense")
    assert any("nothing says `language`" in warning.message for warning in read(tmp_path / "voices").warnings)

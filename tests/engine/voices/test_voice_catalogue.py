"""The voices that are offered are those that the models' own files and voices.yaml describe."""

import re
import time
from pathlib import Path

import pytest
from voice_folders import SAFETENSORS, ids, kokoro, only_warning, overlay, piper, put, read, vits

import engine.backends.tts
from engine import LoadError, demo
from engine.voices.catalogue import read_catalogue
from engine.voices.languages import language_code, language_name, voice_type
from engine.voices.overlay import OverlaySpec, VoiceEntry
from engine.voices.readers import FAMILIES
from engine.voices.types import VoiceWarning

SELAM = {"speaker": None, "id": "selam", "name": "Selam", "gender": "female"}
DOCS = Path(__file__).parents[3] / "docs" / "voices.md"
DEMO_VOICES = demo.weights_dir("chat").parent / "voices"


def test_a_vits_model_with_an_overlay_is_a_voice(tmp_path: Path):
    overlay(vits(tmp_path, "mms-tts-amh"), SELAM, licence="CC-BY-NC-4.0", consent="none given")
    catalogue = read(tmp_path)
    assert catalogue.warnings == ()
    (voice,) = catalogue.voices
    assert catalogue.find("selam") is voice
    assert (voice.name, voice.gender, voice.language, voice.type) == ("Selam", "female", "am", "ethiopian")
    assert (voice.family, voice.speaker, voice.sample_rate, voice.model) == ("vits", None, 16000, "mms-tts-amh")
    assert (voice.folder, voice.description) == (tmp_path / "mms-tts-amh", "Native female voice in Amharic")
    assert (voice.licence, voice.consent, voice.demo, voice.available) == ("CC-BY-NC-4.0", "none given", False, True)


def test_a_gender_is_never_guessed_and_the_warning_says_what_to_write_where(tmp_path: Path):
    vits(tmp_path, "mms-tts-amh")
    catalogue = read(tmp_path)
    assert catalogue.voices == ()
    message = only_warning(catalogue)
    assert "nothing says `name` and `gender`" in message
    assert "mms-tts-amh/voices.yaml" in message
    assert "Pick one: 1." in message
    assert "listen to it first" in message
    assert "{speaker: null, name: Selam, gender: female}" in message


def test_speakers_of_one_model_are_voices_of_their_own(tmp_path: Path):
    folder = vits(tmp_path, "am3", speakers=4)
    overlay(folder, SELAM | {"speaker": 0}, {"speaker": 2, "id": "dawit", "name": "Dawit", "gender": "male"})
    assert {voice.id: voice.speaker for voice in read(tmp_path).voices} == {"selam": 0, "dawit": 2}


def test_the_only_voice_of_a_model_may_be_called_null_or_0_or_nothing(tmp_path: Path):
    for number, speaker in enumerate([{"speaker": None}, {"speaker": 0}, {}]):
        overlay(vits(tmp_path, f"m{number}"), {**speaker, "name": "A", "gender": "male"})
    assert [(voice.id, voice.speaker) for voice in read(tmp_path).voices] == [("m0", None), ("m1", None), ("m2", None)]


@pytest.mark.parametrize(("speaker", "count"), [(3, 3), (-1, 3), ("dawit", 3), (None, 3), (1, 1)])
def test_an_overlay_that_names_a_speaker_the_model_lacks_is_told_so(tmp_path: Path, speaker: object, count: int):
    overlay(vits(tmp_path, "m", speakers=count), SELAM | {"speaker": speaker})
    catalogue = read(tmp_path)
    assert catalogue.voices == ()
    assert "which the model lacks: it has " in only_warning(catalogue)


def test_an_overlay_that_names_a_speaker_twice_keeps_the_first(tmp_path: Path):
    overlay(vits(tmp_path, "m"), SELAM, SELAM | {"id": "other"})
    catalogue = read(tmp_path)
    assert ids(catalogue) == ["selam"]
    assert "twice" in only_warning(catalogue)


@pytest.mark.parametrize(
    ("code", "language", "kind"),
    [
        ("amh", "am", "ethiopian"),
        ("som", "so", "ethiopian"),
        ("tir", "ti", "ethiopian"),
        ("orm", "om", "ethiopian"),
        ("gaz", "om", "ethiopian"),
        ("eng", "en", "english_standard"),
        ("deu", "de", "standard"),
        ("azj-script_cyrillic", "az", "standard"),
        ("sid", "sid", "standard"),
    ],
)
def test_a_language_is_shown_by_its_shortest_code(tmp_path: Path, code: str, language: str, kind: str):
    overlay(vits(tmp_path, "m", code), SELAM)
    (voice,) = read(tmp_path).voices
    assert (voice.language, voice.type) == (language, kind)


def test_codes_of_languages():
    assert language_code("en_US") == language_code("EN-gb") == language_code("eng") == "en"
    assert [language_code(text) for text in ("xx", "english", "", "und", "am\n", None, 7, ["en"])] == [None] * 8
    assert (language_name("ti"), language_name("sid"), voice_type("fr")) == ("Tigrinya", "sid", "standard")


def test_language_and_licence_may_come_from_the_model_card(tmp_path: Path):
    folder = overlay(vits(tmp_path, "m", None), SELAM)
    put(folder, "README.md", "---\nlanguage:\n- so\nlicense: apache-2.0\ntags: [mms, vits]\n---\n# Card\n")
    (voice,) = read(tmp_path).voices
    assert (voice.language, voice.licence) == ("so", "apache-2.0")


def test_a_card_with_several_languages_decides_nothing(tmp_path: Path):
    folder = overlay(vits(tmp_path, "m", None), SELAM)
    put(folder, "README.md", "---\nlanguage: [am, so]\nlicense: other\nlicense_name: research-only\n---\n")
    assert "nothing says `language`" in only_warning(read(tmp_path))


def test_an_overlay_may_stand_in_the_model_card(tmp_path: Path):
    card = "---\nservice_voices:\n  voices:\n  - {id: tolosa, name: Tolosa, gender: male}\n---\n# Card\n"
    put(vits(tmp_path, "m", "orm"), "README.md", card)
    assert ids(read(tmp_path)) == ["tolosa"]
    put(tmp_path / "m", "README.md", card.replace("gender: male", "gender: man"))
    assert "README.md: line 4: service_voices.voices[0].gender: must be one of" in only_warning(read(tmp_path))
    overlay(tmp_path / "m", SELAM)
    catalogue = read(tmp_path)
    assert (ids(catalogue), catalogue.warnings) == (["selam"], ())


def test_an_overlay_corrects_what_the_model_says(tmp_path: Path):
    kokoro_voice = {"speaker": "af_heart", "id": "heart", "name": "Hearty", "gender": "male", "language": "eng"}
    overlay(kokoro(tmp_path, "k", "af_heart.safetensors", "bm_lewis.safetensors"), kokoro_voice)
    (voice,) = read(tmp_path).voices
    assert (voice.id, voice.name, voice.gender, voice.language) == ("heart", "Hearty", "male", "en")


def test_a_voice_whose_runtime_is_missing_is_listed_and_not_available(tmp_path: Path):
    overlay(piper(tmp_path, "p"), {"gender": "male"})
    catalogue = read(tmp_path)
    assert [voice.available for voice in catalogue.voices] == [False]
    assert "what runs piper is not installed: pip install piper-tts" in only_warning(catalogue)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("model.safetensors", None, "no .safetensors file"),
        ("model.safetensors", b"", "is empty"),
        ("model.safetensors", SAFETENSORS[:-1], "cut off or damaged"),
        ("model.safetensors", (2**40).to_bytes(8, "little") + b"{}", "is damaged"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("vocab.json", None, "no vocab.json"),
        ("tokenizer_config.json", b'{"language": "amh", "phonemize": true}', "it was made for phonemes"),
    ],
)
def test_a_voice_without_sound_weights_is_listed_and_not_available(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
):
    folder = overlay(vits(tmp_path, "m"), SELAM)
    (folder / name).unlink()
    if content is not None:
        put(folder, name, content)
    catalogue = read(tmp_path)
    assert [(voice.id, voice.available) for voice in catalogue.voices] == [("selam", False)]
    assert complaint in only_warning(catalogue)


def test_a_real_voice_replaces_the_demo_voice_of_its_id(tmp_path: Path):
    overlay(
        vits(tmp_path / "demo", "demo-am", speakers=2), SELAM | {"speaker": 0}, SELAM | {"speaker": 1, "id": "hana"}
    )
    overlay(vits(tmp_path / "real", "mms"), SELAM)
    catalogue = read(tmp_path / "real", tmp_path / "demo")
    assert {voice.id: (voice.model, voice.demo) for voice in catalogue.voices} == {
        "selam": ("mms", False),
        "hana": ("demo-am", True),
    }


def test_two_real_voices_of_one_id_are_an_error_that_names_both_folders(tmp_path: Path):
    for name in ("one", "two"):
        overlay(vits(tmp_path / "voices", name), SELAM)
    with pytest.raises(LoadError, match=r"id selam: one in voices/one, one in voices/two\.") as caught:
        read(tmp_path / "voices")
    assert str(tmp_path) not in caught.value.message


def test_voices_come_in_the_order_of_the_interface(tmp_path: Path):
    for language in ("deu", "eng", "orm", "tir", "som", "amh"):
        folder = vits(tmp_path, language, language, speakers=2)
        entries = [{"speaker": 0, "id": f"{language}-m", "gender": "male"}, {"speaker": 1, "gender": "female"}]
        overlay(folder, *({"id": f"{language}-f", "name": "N"} | entry for entry in entries))
    languages = [(voice.language, voice.gender) for voice in read(tmp_path).voices]
    assert languages == [(code, kind) for code in ("am", "so", "ti", "om", "en", "de") for kind in ("female", "male")]


def test_folders_that_are_not_there_hold_no_voices(tmp_path: Path):
    catalogue = read_catalogue(tmp_path / "none")
    assert (catalogue.voices, catalogue.warnings, catalogue.find("selam")) == ((), (), None)


def test_a_model_of_another_family_and_a_model_outside_a_folder_are_named(tmp_path: Path):
    put(tmp_path, "parler/config.json", {"model_type": "parler_tts"})
    put(tmp_path, "config.json", {"model_type": "vits"})
    put(tmp_path, ".cache/x", "")
    put(tmp_path, "notes.txt", "")
    other, outside = sorted(warning.message for warning in read(tmp_path).warnings)[::-1]
    assert "parler is hidden: it is not a TTS model that Hearth knows (kokoro: " in other
    assert "config.json is left out: each model is in a folder of its own" in outside


def test_each_family_has_a_file_in_the_backend():
    assert [family.name for family in FAMILIES] == ["kokoro", "piper", "vits", "omnivoice", "espeak"]
    for family in FAMILIES:
        assert (Path(engine.backends.tts.__file__).parent / f"{family.name}.py").is_file()


def test_a_warning_can_be_printed_anywhere():
    warning = VoiceWarning("a\x1b[2J", "\u202eb", "c\nd" + "\0" * 5000)
    assert all(text.isprintable() for text in (warning.model, warning.voice or "", warning.message))


def test_twenty_folders_are_read_at_once(tmp_path: Path):
    for number in range(20):
        overlay(vits(tmp_path, f"m{number}"), SELAM | {"id": f"v{number}"})
    seconds = []
    for _ in range(5):
        started = time.process_time()  # of this process alone: the machine may be busy
        assert len(read(tmp_path).voices) == 20
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1, seconds


@pytest.mark.skipif(not DEMO_VOICES.is_dir(), reason="the demo voices have not been built")
def test_the_demo_voices_are_the_nine_of_the_interface():
    catalogue = read_catalogue(None, DEMO_VOICES)
    assert catalogue.warnings == ()
    assert [(voice.language, voice.gender, voice.id, voice.type) for voice in catalogue.voices] == [
        ("am", "female", "hana", "ethiopian"),
        ("am", "female", "selam", "ethiopian"),
        ("am", "male", "dawit", "ethiopian"),
        ("so", "female", "hodan", "ethiopian"),
        ("so", "male", "warsame", "ethiopian"),
        ("ti", "male", "berhane", "ethiopian"),
        ("om", "male", "tolosa", "ethiopian"),
        ("en", "female", "emma", "english_standard"),
        ("en", "male", "james", "english_standard"),
    ]
    for voice in catalogue.voices:
        assert voice.available
        assert voice.demo
        assert voice.name == voice.id.capitalize()
        assert voice.licence
        assert voice.consent
        assert voice.description
        assert (voice.family, voice.sample_rate) == ("vits", 16000)


def test_the_docs_name_every_key_of_voices_yaml():
    section = DOCS.read_text("utf-8").split("\n## voices.yaml\n")[1].split("\n## ")[0]
    top, entry = section.split("An entry of `voices`:")
    for text, spec in ((top, OverlaySpec), (entry, VoiceEntry)):
        assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(spec.model_fields)


def test_the_examples_of_the_docs_are_read_as_written(tmp_path: Path):
    examples = re.findall(r"```yaml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    own, many, kokoros, omni = examples
    put(vits(tmp_path, "own", speakers=2), "voices.yaml", own)
    names = {f"p{number + 225}": number for number in range(9)}
    put(piper(tmp_path, "vctk", "en_GB-vctk-medium", num_speakers=9, speaker_id_map=names), "voices.yaml", many)
    put(kokoro(tmp_path, "kokoro", "af_heart.safetensors", "am_michael.safetensors"), "voices.yaml", kokoros)
    put(tmp_path / "omnivoice", "config.json", {"model_type": "omnivoice"})
    put(tmp_path / "omnivoice", "voices.yaml", omni.replace("almaz", "almaz-2"))
    catalogue = read(tmp_path)
    assert set(ids(catalogue)) == {
        *("almaz", "almaz-2", "kebede", "piper-en-gb-vctk-medium-p225", "colin"),
        *("kokoro-af-heart", "michael"),
    }
    assert all("cannot speak" in warning.message for warning in catalogue.warnings)

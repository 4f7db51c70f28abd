"""What models of the families Kokoro and Piper say of their voices, and what keeps them from speaking."""

from pathlib import Path

import pytest
from tiny_omnivoice import omnivoice_files
from voice_folders import ONNX, ids, install, kokoro, only_warning, overlay, piper, put, read


def test_kokoro_says_everything_in_the_names_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, tmp_path, "espeakng_loader")
    root = tmp_path / "voices"
    folder = kokoro(root, "Kokoro-82M", "af_heart.safetensors", "am_michael.safetensors", "ff_siwis.safetensors")
    put(folder, "README.md", "---\nlicense: apache-2.0\nlanguage: [en]\n---\n")
    catalogue = read(root)
    assert catalogue.warnings == ()
    assert [(voice.id, voice.name, voice.gender, voice.language, voice.speaker) for voice in catalogue.voices] == [
        ("kokoro-af-heart", "Heart", "female", "en", "af_heart"),
        ("kokoro-am-michael", "Michael", "male", "en", "am_michael"),
        ("kokoro-ff-siwis", "Siwis", "female", "fr", "ff_siwis"),
    ]
    assert {(voice.licence, voice.available, voice.sample_rate) for voice in catalogue.voices} == {
        ("apache-2.0", True, 24000)
    }


def test_a_kokoro_voice_with_an_unusual_name_needs_an_entry(tmp_path: Path):
    folder = kokoro(tmp_path, "k", "my_blend.safetensors")
    assert (
        "voice my_blend is hidden: nothing says `name` and `gender` and `language`"
        in read(tmp_path).warnings[0].message
    )
    overlay(folder, {"speaker": "my_blend", "name": "Blend", "gender": "female", "language": "en"})
    assert ids(read(tmp_path)) == ["kokoro-my-blend"]


@pytest.mark.parametrize(
    ("weights", "voice", "complaint"),
    [
        ("kokoro-v1_0.pth", "af_heart.safetensors", "kokoro-v1_0.pth is a pickle"),
        ("kokoro-v1_0.safetensors", "af_heart.pt", "voices/af_heart.pt may be a pickle"),
        ("kokoro-v1_0.safetensors", "af_heart.bin", "voices/af_heart.bin may be a pickle"),
        ("kokoro-v1_0.onnx", "af_heart.safetensors", "there is no .safetensors file"),
    ],
)
def test_pickles_of_kokoro_are_listed_but_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, voice: str, complaint: str
):
    install(monkeypatch, tmp_path, "espeakng_loader")
    kokoro(tmp_path / "voices", "k", voice, weights=weights)
    catalogue = read(tmp_path / "voices")
    assert [(one.id, one.available) for one in catalogue.voices] == [("kokoro-af-heart", False)]
    assert complaint in only_warning(catalogue)


def test_japanese_and_chinese_voices_of_kokoro_are_listed_and_cannot_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(monkeypatch, tmp_path, "espeakng_loader")
    kokoro(tmp_path / "voices", "k", "jf_alpha.safetensors", "ff_siwis.safetensors")
    catalogue = read(tmp_path / "voices")
    assert {voice.language: voice.available for voice in catalogue.voices} == {"ja": False, "fr": True}
    assert "voice jf_alpha is listed but cannot speak: its Japanese and Chinese voices" in only_warning(catalogue)


def test_a_voice_of_omnivoice_is_an_instruction(tmp_path: Path):
    folder = tmp_path / "OmniVoice"
    put(folder, "config.json", {"model_type": "omnivoice", "num_audio_codebook": 8})
    assert ids(read(tmp_path)) == []
    overlay(
        folder,
        {"speaker": "female, young adult", "id": "almaz", "name": "Almaz", "language": "am"},
        {"speaker": "Male,low pitch", "id": "kebede", "name": "Kebede", "language": "am"},
        {"speaker": "purple", "id": "x", "name": "X", "language": "am"},
        licence="CC-BY-NC-4.0",
    )
    catalogue = read(tmp_path)
    assert [(voice.id, voice.gender, voice.speaker, voice.available) for voice in catalogue.voices] == [
        ("almaz", "female", "am: female, young adult", False),
        ("kebede", "male", "am: male, low pitch", False),
    ]
    lacking, problem = (warning.message for warning in catalogue.warnings)
    assert "names speaker purple, which the model lacks" in lacking
    assert "cannot speak: there is no model.safetensors; finish the download" in problem


def test_an_instruction_of_omnivoice_is_another_voice_in_each_language(tmp_path: Path):
    folder = tmp_path / "omnivoice"
    for name, content in omnivoice_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    overlay(
        folder,
        {"speaker": "female", "language": "am", "name": "A"},
        {"speaker": "female", "language": "so", "name": "S"},
    )
    catalogue = read(tmp_path)
    assert not catalogue.warnings
    assert [(voice.id, voice.language, voice.licence, voice.available) for voice in catalogue.voices] == [
        ("omnivoice-am-female", "am", "cc-by-nc-4.0", True),
        ("omnivoice-so-female", "so", "cc-by-nc-4.0", True),
    ]
    (folder / "audio_tokenizer" / "model.safetensors").write_bytes(b"x" * 9)
    assert "audio_tokenizer/model.safetensors is" in only_warning(read(tmp_path))


def test_a_safe_copy_of_a_kokoro_voice_wins_over_the_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, tmp_path, "espeakng_loader")
    kokoro(tmp_path / "voices", "k", "af_heart.pt", "af_heart.safetensors")
    catalogue = read(tmp_path / "voices")
    assert [(voice.id, voice.available) for voice in catalogue.voices] == [("kokoro-af-heart", True)]


def test_a_piper_model_says_language_name_and_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, tmp_path, "piper", "onnxruntime")
    folder = piper(tmp_path / "voices", "p")
    put(folder, "MODEL_CARD", "# Model card for hodan (medium)\n\n* Language: so_SO\n\n## Dataset\n\n* License: CC0\n")
    assert "nothing says `gender`" in only_warning(read(tmp_path / "voices"))
    overlay(folder, {"gender": "female"})
    (voice,) = read(tmp_path / "voices").voices
    assert (voice.id, voice.name, voice.language, voice.licence) == (
        "piper-so-so-hodan-medium",
        "Hodan",
        "so",
        "CC0",
    )
    assert (voice.family, voice.speaker, voice.sample_rate, voice.available) == ("piper", None, 22050, True)


def test_a_piper_model_that_needs_other_phonemes_is_not_available(tmp_path: Path):
    overlay(piper(tmp_path, "p", phoneme_type="pinyin"), {"gender": "male"})
    assert any("only the phoneme types espeak and text" in warning.message for warning in read(tmp_path).warnings)


def test_speakers_of_a_piper_model_go_by_name_or_number(tmp_path: Path):
    folder = piper(tmp_path, "p", "en_GB-vctk-medium", language={}, num_speakers=3, speaker_id_map={"p1": 2, "p2": 0})
    overlay(
        folder,
        {"speaker": "p1", "gender": "female"},
        {"speaker": 0, "gender": "male"},
        {"speaker": 1, "gender": "male"},
        language="en",
    )
    catalogue = read(tmp_path)
    assert [(voice.id, voice.name, voice.speaker) for voice in catalogue.voices] == [
        ("piper-en-gb-vctk-medium-p1", "p1", 2),
        ("piper-en-gb-vctk-medium-p2", "p2", 0),
    ]
    assert "voice 1 is hidden: nothing says `name`" in catalogue.warnings[0].message


def test_two_piper_models_in_one_folder_are_told_to_part(tmp_path: Path):
    piper(tmp_path, "p", "a-b-c")
    piper(tmp_path, "p", "d-e-f")
    assert "has 2 Piper models: put each" in only_warning(read(tmp_path))


def test_an_onnx_file_that_is_a_pointer_is_not_taken_for_a_model(tmp_path: Path):
    folder = overlay(piper(tmp_path, "p"), {"gender": "male"})
    put(folder, "so_SO-hodan-medium.onnx", b"version https://git-lfs.github.com/spec/v1\n")
    assert any("git lfs pull" in warning.message for warning in read(tmp_path).warnings)
    put(folder, "so_SO-hodan-medium.onnx", ONNX)
    assert not any("git lfs pull" in warning.message for warning in read(tmp_path).warnings)

"""Kokoro: its network as the original computes it, phonemes as it has learned them, and what it is refused for."""
# ruff: noqa: RUF001  # letters of the IPA

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speech_booth import Booth
from tiny_kokoro import CONFIG, STYLE, kokoro_files, random_weights

from engine.backends.tts.kokoro import Kokoro, load, load_weights, phonemes
from engine.errors import LoadError, RequestError
from engine.weights.download import converted
from engine.weights.manifest import ModelFile

pytest.importorskip("espeakng_loader", reason="set up with --no-espeak")

VOICE: dict[str, Any] = {"family": "kokoro", "speaker": "af_heart"}
# The package kokoro 0.9.4 made these of the same weights, style, numbers and seed (KModel.forward_with_tokens; every
# 400th sample, the decoder's width being 16 there, too).
ORIGINAL = [
    *(0.1142, -0.08924, 0.04099, 0.13266, -0.03417, 0.13028, -0.02341, 0.06657, 0.09283),
    *(0.09488, 0.01768, 0.02486, 0.022, 0.01807, 0.21011, 0.1478, 0.09216, -0.0011),
    *(-0.08938, -0.03558, 0.11777, -0.01418, 0.14187, -0.07619, 0.00023, 0.05277, 0.13737),
    *(0.05166, -0.0587, 0.1314, 0.12703, 0.02618, 0.18777, 0.19532, -0.05207, 0.02968),
    *(0.13981, -0.06405, 0.04105, 0.23331, 0.06195, 0.56814, 0.02686, -0.00098, 0.47559),
    *(0.03497, 0.06147, 0.22151, 0.40717, 0.03637, 0.21522, 0.01986, 0.15414, 0.02124),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("voices") / "kokoro"
    files = kokoro_files("af_heart", "bm_george", "ef_dora", "jf_alpha")
    for name, content in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    converted(made, tuple(ModelFile(path=name, size_bytes=len(content)) for name, content in files.items()))
    return made


def test_the_network_computes_what_the_original_does():
    model = Kokoro(CONFIG).eval()
    load_weights(model, random_weights(model, 3))
    style = torch.randn(1, 2 * STYLE, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(5)
    with torch.inference_mode():
        samples = model(torch.tensor([[0, 12, 9, 15, 7, 40, 4, 8, 0]]), style).numpy()
    # The first frame of the source's spectrum is real, since it is padded with its mirror image; the sign of what is left
    # of its imaginary part, and with it whether a phase is pi or -pi, differs between processors.
    assert samples[::400][:2] == pytest.approx(ORIGINAL[:2], abs=0.2)
    assert samples[::400][2:] == pytest.approx(ORIGINAL[2:], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        ("a", "Hello, world. No boys!", "həlˈO, wˈɜɹld. nˈO bˈYz!"),
        ("b", "Go home, there.", "ɡˌQ hˈQm, ðˈɛː."),
        ("e", "Buenos días, ¿cómo está?", "bwˈenos ðˈias, ¿kˈomo estˈa?"),
        ("f", "Bonjour, le monde.", "bɔ̃ʒˈuʁ, lə mˈɔ̃d."),
        ("h", "यह पहला है।", "jˌəh pˈʌhəlˌaː hɛː."),
        ("f", "Le parking.", "lə pˈɑːkɪŋ."),
    ],
)
def test_phonemes_are_those_that_it_has_learned_and_marks_stay(code: str, text: str, said: str):
    assert phonemes(text, code) == said


def test_a_converted_voice_speaks_alike_every_time_and_each_its_own_way(folder: Path):
    booth = Booth(folder)
    first = booth.samples(**VOICE)
    assert len(first) > 24_000
    assert np.array_equal(first, booth.samples(**VOICE))
    assert not np.array_equal(first, booth.samples(family="kokoro", speaker="bm_george"))
    assert len(booth.samples(speed=2, **VOICE)) == pytest.approx(len(first) / 2, rel=0.01)


def test_letters_that_it_does_not_know_are_skipped_and_what_takes_too_many_phonemes_is_spoken_in_parts(folder: Path):
    booth = Booth(folder)
    assert np.array_equal(booth.samples("Hello 世界 there.", **VOICE), booth.samples("Hello there.", **VOICE))
    assert isinstance(booth.failure("你好，世界", **VOICE), RequestError)
    assert load(folder).sayable("1ª, 2º, π, नमस्ते") == "1ª, 2º, π, नमस्ते"
    row = ", ".join(["77777777"] * 9)
    assert len(phonemes(row, "e")) > 510
    assert booth.speak(row, language="es", **{**VOICE, "speaker": "ef_dora"})[1] > 10
    assert booth.speak("One 😂" + "😂" * 80, **VOICE)[1] > 10


def test_a_language_without_rules_and_a_model_that_lacks_tensors_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(LoadError, match="Japanese and Chinese"):
        load(folder).speak("ha", "jf_alpha", 1, 1)
    model = Kokoro(CONFIG)
    assert load_weights(model, {}) != []
    with pytest.raises(LoadError):
        load(tmp_path)

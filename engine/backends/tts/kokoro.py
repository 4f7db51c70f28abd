"""Speaks with Kokoro (kokoro*.safetensors, voices/*.safetensors): the network is ours, phonemes are eSpeak NG's."""
# ruff: noqa: RUF001  # letters of the IPA

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from engine.backends.tts import check_complete
from engine.backends.tts.espeak_ng import library
from engine.backends.tts.kokoro_net import SAMPLE_RATE, Kokoro, load_weights
from engine.backends.tts.sound import stretch
from engine.errors import GenerationError, LoadError
from engine.weights.safety import check_no_code, check_safetensors, read_config

# The first letter of a voice's name, and what eSpeak NG calls its language. It has no rules for Japanese and Chinese.
_LANGUAGES = {"a": "en-us", "b": "en", "e": "es", "f": "fr", "h": "hi", "i": "it", "p": "pt-br"}
_STYLES = 510  # of a voice: one for each number of phonemes
_TIE = "^"
_MARKS = re.compile(r"([;:,.!?\u00a1\u00bf\u2014\u2026\"\u201c\u201d()]+)")
_OTHER_LANGUAGE = re.compile(r"\([a-z-]+\)")
# From the phonemes of eSpeak NG to those that Kokoro has learned. Source: misaki 0.9.4, espeak.py (Apache-2.0).
_ENGLISH = (
    *(("ʔˌn\u0329", "ʔn"), ("ʔn\u0329", "ʔn"), ("a^ɪ", "I"), ("a^ʊ", "W"), ("d^ʒ", "ʤ"), ("e^ɪ", "A"), ("t^ʃ", "ʧ")),
    *(("ɔ^ɪ", "Y"), ("ə^l", "ᵊl"), ("ʲo", "jo"), ("ʲə", "jə"), ("ʲ", ""), ("ɚ", "əɹ"), ("r", "ɹ"), ("x", "k")),
    *(("ç", "k"), ("ɐ", "ə"), ("ɬ", "l"), ("\u0303", "")),
)
_AMERICAN = (("o^ʊ", "O"), ("ɜːɹ", "ɜɹ"), ("ɜː", "ɜɹ"), ("ɪə", "iə"), ("ː", ""))
_BRITISH = (("e^ə", "ɛː"), ("iə", "ɪə"), ("ə^ʊ", "Q"))
_LAST_OF_ENGLISH = (("e", "A"), ("o", "ɔ"), ("ɾ", "T"), ("ʔ", "t"))
_OTHERS = (
    *(("a^ɪ", "I"), ("a^ʊ", "W"), ("d^z", "ʣ"), ("d^ʒ", "ʤ"), ("e^ɪ", "A"), ("o^ʊ", "O"), ("ə^ʊ", "Q"), ("s^s", "S")),
    *(("t^s", "ʦ"), ("t^ʃ", "ʧ"), ("ɔ^ɪ", "Y"), ("-", "")),
)
_SYLLABIC = re.compile(r"(\S)\u0329")


def load(folder: Path) -> "KokoroSpeech":
    check_no_code(folder / "config.json")
    file = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if file is None:
        raise LoadError(
            f"{folder.name} has no .safetensors file. Pickles (.pth) can run code and are refused: "
            "`hearth voices add kokoro` fetches the model and converts it."
        )
    check_safetensors(file)
    config = read_config(folder / "config.json")
    model = Kokoro(config).eval()
    check_complete(folder.name, load_weights(model, load_file(file)))
    return KokoroSpeech(folder, model, config["vocab"], 2 * config["style_dim"])


class KokoroSpeech:
    """A `Synthesizer` (service.py)."""

    sample_rate = SAMPLE_RATE

    def __init__(self, folder: Path, model: Kokoro, numbers: dict[str, int], style: int) -> None:
        self._folder, self._model, self._numbers, self._style = folder, model, numbers, style
        self._voice = cache(self._load_voice)

    def sayable(self, text: str) -> str:
        return text

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        name = str(speaker)
        said = phonemes(text, name[:1])
        numbers = [number for one in said if (number := self._numbers.get(one)) is not None]
        if not numbers:
            return np.zeros(0, np.float32)
        if len(numbers) + 2 > min(self._model.most, _STYLES):
            raise GenerationError("A sentence of this text is too long for the voice. Write it in shorter ones.")
        torch.manual_seed(seed)
        with torch.inference_mode():
            samples = self._model(torch.tensor([[0, *numbers, 0]]), self._voice(name)[len(numbers) - 1])
        return stretch([samples.numpy()], self.sample_rate, speed)

    def _load_voice(self, name: str) -> torch.Tensor:
        file = self._folder / "voices" / f"{name}.safetensors"
        check_safetensors(file)
        tensors: list[Any] = list(load_file(file).values())
        if len(tensors) != 1 or tensors[0].shape != (_STYLES, 1, self._style):
            raise LoadError(f"{self._folder.name}/voices/{name}.safetensors has no voice of Kokoro.")
        return tensors[0].float()


def phonemes(text: str, code: str) -> str:
    """Return what Kokoro reads for a text, in the language that the first letter of a voice stands for."""
    language = _LANGUAGES.get(code)
    if language is None:
        raise LoadError("Kokoro's Japanese and Chinese voices need reading rules that Hearth lacks.")
    speech = library()
    speech.choose_language(language)
    # Marks are part of what it has learned, and eSpeak NG drops them.
    parts = [part if at % 2 else _read(speech, part) for at, part in enumerate(_MARKS.split(text))]
    said = "".join(parts).strip()
    if code in "ab":
        said = _replaced(said, (*_ENGLISH, *(_AMERICAN if code == "a" else _BRITISH), *_LAST_OF_ENGLISH))
        said = _SYLLABIC.sub("ᵊ\\1", said)
    else:
        said = _replaced(said, _OTHERS)
    return said.replace(_TIE, "")


def _read(speech: Any, part: str) -> str:
    words = _OTHER_LANGUAGE.sub("", speech.phonemes(part, tie=_TIE))
    return f"{' ' * part.startswith(' ')}{words}{' ' * (part.endswith(' ') and len(part) > 1)}" if words else part[:1]


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text

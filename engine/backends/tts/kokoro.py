"""Speaks with Kokoro (kokoro*.safetensors and voices/*.safetensors), through its package where that is installed."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from engine.backends.tts.sound import stretch
from engine.errors import LoadError
from engine.voices.readers import is_installed
from engine.weights.safety import check_no_code, check_safetensors, read_config

_ENGLISH_WORDS = "en_core_web_sm"
_REPOSITORY = "hexgrad/Kokoro-82M"  # the package wants a name; nothing is fetched from it
_STYLE = (1, 256)  # of a voice, for each number of phonemes


def load(folder: Path) -> "KokoroSpeech":
    check_no_code(folder / "config.json")
    weights = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if weights is None:
        raise LoadError(
            f"{folder.name} holds no .safetensors file. Convert the model: pickles (.pth) can run code and are refused."
        )
    check_safetensors(weights)
    from kokoro import KModel

    with tempfile.TemporaryDirectory() as name:
        # Its constructor reads weights from a pickle, or downloads one: give it an empty one.
        nothing = Path(name) / "nothing.pth"
        torch.save({}, nothing)
        model = KModel(_REPOSITORY, read_config(folder / "config.json"), str(nothing))
    # Named like `decoder.…`; every one of them must find its place.
    model.load_state_dict({name.replace(".module.", ".", 1): tensor for name, tensor in load_file(weights).items()})
    return KokoroSpeech(folder, model.eval())


class KokoroSpeech:
    """A `Synthesizer` (service.py)."""

    sample_rate = 24_000

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder, self._model = folder, model
        self._voice, self._pipeline = cache(self._load_voice), cache(self._load_pipeline)

    def sayable(self, text: str) -> str:
        return text

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        name = str(speaker)
        voice = self._voice(name)
        torch.manual_seed(seed)
        with torch.inference_mode():
            results = list(self._pipeline(name[0])(text, voice=voice, speed=1, split_pattern=None))
        return stretch([one.audio.numpy() for one in results if one.audio is not None], self.sample_rate, speed)

    def _load_voice(self, name: str) -> torch.Tensor:
        file = self._folder / "voices" / f"{name}.safetensors"
        check_safetensors(file)
        tensors = list(load_file(file).values())
        if len(tensors) != 1 or tensors[0].shape[1:] != _STYLE:
            raise LoadError(f"{self._folder.name}/voices/{name}.safetensors holds no voice of Kokoro.")
        return tensors[0].float()

    def _load_pipeline(self, code: str) -> Any:
        """Return what makes phonemes of a language; the first letter of a voice says which."""
        if code in "ab" and not is_installed(_ENGLISH_WORDS):
            raise LoadError(
                f"Kokoro's English voices need the package {_ENGLISH_WORDS}: python -m spacy download {_ENGLISH_WORDS}"
            )
        from kokoro import KPipeline

        try:
            return KPipeline(code, _REPOSITORY, model=self._model)
        except (ImportError, AssertionError, RuntimeError) as error:
            raise LoadError(f"Kokoro cannot speak the language of its voices {code}*_*.") from error

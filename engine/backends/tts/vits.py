"""Speaks with VITS models of transformers, like Meta's MMS voices, one sentence at a time, on the CPU."""

import unicodedata
import warnings
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import VitsModel, VitsTokenizer

from engine.backends.tts import check_complete, only_of
from engine.errors import GenerationError
from engine.weights.safety import check_folder

# A piece of text is 200 characters, some 20 s. A model that makes minutes of it is broken.
_LONGEST_SECONDS = 120
_TRAINING_ONLY = "posterior_encoder."
_PUNCTUATION = str.maketrans({"\u2019": "'", "\u02bc": "'", "\u2018": "'", "\u2013": "-", "\u2014": "-"})


def load(folder: Path) -> "VitsSpeech":
    check_folder(folder)
    with warnings.catch_warnings():
        # torch.nn.utils.weight_norm, used by transformers itself for these models.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers)\b")
        tokenizer = VitsTokenizer.from_pretrained(folder, local_files_only=True)
        model, found = VitsModel.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    check_complete(folder.name, sorted(name for name in found["missing_keys"] if not name.startswith(_TRAINING_ONLY)))
    return VitsSpeech(tokenizer, model.eval())


class VitsSpeech:
    """A `Synthesizer` (service.py)."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.sample_rate: int = model.config.sampling_rate
        self._tokenizer = tokenizer
        self._model = model
        most_frames = _LONGEST_SECONDS * self.sample_rate // prod(model.config.upsample_rates)
        self._pace = _Pace(model.duration_predictor, model.speaking_rate, most_frames)
        model.duration_predictor, model.speaking_rate = self._pace, 1.0
        # Signs without a sound. Some models use a letter's number for the pad token: that letter is spoken.
        signs = (tokenizer.pad_token, tokenizer.unk_token)
        self._letters = frozenset(tokenizer.get_vocab()) - {sign for sign in signs if sign and not sign.isalpha()}

    def sayable(self, text: str) -> str:
        """As `Synthesizer.sayable`: in Latin letters where the model takes those for another script."""
        text = unicodedata.normalize("NFC", text).translate(_PUNCTUATION)
        if self._tokenizer.phonemize:
            return text
        if self._tokenizer.is_uroman and not text.isascii():
            # ASCII only, or the tokenizer would set up a romaniser of its own: seconds each time. It reads any script.
            text = _romaniser()(only_of(text, "ETHIOPIC", "LATIN")).encode("ascii", "ignore").decode()
        return " ".join("".join(map(self._known, text)).split())

    def _known(self, character: str) -> str:
        """The character in a form that has a number, else nothing for a letter, and a space between words."""
        plain = unicodedata.normalize("NFKD", character)[0]
        forms = (character, character.lower(), plain, plain.lower())
        nothing = "" if unicodedata.category(character)[0] in "LM" else " "
        return next((form for form in forms if form in self._letters), nothing)

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        self._pace.speed = speed
        torch.manual_seed(seed)  # VITS draws from the global generator
        with torch.inference_mode():
            return self._model(**self._tokenizer(text, return_tensors="pt"), speaker_id=speaker).waveform[0].numpy()


class _Pace(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Wraps a model's duration predictor, so that durations add up to 1/`speed` of the natural ones.

    The model divides each letter's duration and rounds it up to a whole frame, so its `speaking_rate` of 2 is far from
    half the length. Here the sum is divided and rounded; at high speed some letters get no frame.
    """

    def __init__(self, predictor: torch.nn.Module, natural_rate: float, most_frames: int) -> None:
        super().__init__()
        self._predictor = predictor
        self._natural_rate = natural_rate
        self._most_frames = most_frames
        self.speed = 1.0

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Return logarithms of whole numbers of frames, less a half: the model rounds them up."""
        natural = torch.ceil(torch.exp(self._predictor(*arguments, **named)) / self._natural_rate)
        if not natural.sum() <= self._most_frames:  # NaN neither
            raise GenerationError(
                "The voice could not find a length for this text. Try again, or write it in other words."
            )
        ends = torch.round(torch.cumsum(natural, -1) / self.speed)
        frames = torch.diff(ends, prepend=torch.zeros_like(ends[..., :1]))
        return torch.log(torch.clamp(frames - 0.5, min=0))


@cache
def _romaniser() -> Callable[[str], str]:
    """Made once for the worker: reading its tables takes seconds."""
    import uroman

    return uroman.Uroman().romanize_string

"""Speaks with OmniVoice: a masked language model over codes of sound, whose speaker is an instruction; on the CPU.

All codes of a sentence begin masked; each step fixes those that the model is surest of. Sources: the paper (arXiv
2604.00688) and the package omnivoice 0.2.1, which computes the same from the same random numbers. The codec's decoder
is that of transformers' HiggsAudioV2Tokenizer, without the encoder and what it needs.
"""

import math
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import embedding, linear
from transformers import DacConfig, DacModel, Qwen3Config, Qwen3Model

from engine.backends.tts import check_complete
from engine.backends.tts.sound import gain
from engine.errors import LoadError
from engine.weights.safety import check_folder, check_no_code, check_safetensors, read_config

_STEPS = 16  # of 32 that are usual on a GPU; half of them are its authors' choice where time counts
_GUIDANCE = 2.0
_SHIFT = 0.1
_LAYER_PENALTY = 5.0
_POSITION_TEMPERATURE = 5.0
# A sentence that is longer is spoken in parts, as the model has learned.
_LONGEST_SECONDS = 15
_EDGE_SECONDS = 0.1  # of silence that stays at both ends
_SILENT = 0.003
_MARKS = ("<|lang_start|>", "<|lang_end|>", "<|instruct_start|>", "<|instruct_end|>", "<|text_start|>", "<|text_end|>")
# A voice says this once; all other texts are spoken in the voice of that sound.
_FIRST_WORDS = {
    "am": "ሰላም፣ እንደምን አደሩ? ዛሬ ጥሩ ቀን ነው።",
    "en": "Good morning. It is nice to meet you today.",
    "om": "Akkam bultan? Har'a guyyaa gaarii dha.",
    "so": "Subax wanaagsan. Sidee tahay maanta?",
    "ti": "ሰላም፣ ከመይ ሓዲርኩም? ሎሚ ጽቡቕ መዓልቲ እዩ።",
}
# How long a character takes against a Latin letter, by the first word of its name; and 25 frames for this sentence.
_LENGTHS = {
    **dict.fromkeys(("CJK", "ETHIOPIC", "YI"), 3.0),
    "HANGUL": 2.5,
    "HIRAGANA": 2.2,
    "KATAKANA": 2.2,
    "THAI": 1.5,
    "LAO": 1.5,
    "ARABIC": 1.5,
    "HEBREW": 1.5,
    **dict.fromkeys(("BENGALI", "DEVANAGARI", "GUJARATI", "GURMUKHI", "KANNADA", "KHMER", "MALAYALAM"), 1.8),
    **dict.fromkeys(("MYANMAR", "ORIYA", "SINHALA", "TAMIL", "TELUGU", "TIBETAN"), 1.8),
}
_KINDS = {"M": 0.0, "P": 0.5, "S": 0.5, "Z": 0.2, "N": 3.5}
_FRAMES_PER_LENGTH = 25 / 14.1
_SHORT_FRAMES = 50  # a shorter text gets more time than its letters


def load(folder: Path) -> "OmniVoiceSpeech":
    check_folder(folder)
    codec = folder / "audio_tokenizer"
    check_no_code(codec / "config.json")
    check_safetensors(codec / "model.safetensors")
    config = read_config(folder / "config.json")
    return OmniVoiceSpeech(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        _Network(config, load_file(folder / "model.safetensors"), folder.name),
        _Codec(read_config(codec / "config.json"), load_file(codec / "model.safetensors"), folder.name),
    )


@dataclass(frozen=True, slots=True)
class _Said:
    """A text and the codes of its sound."""

    text: str
    codes: torch.Tensor


class OmniVoiceSpeech:
    """A `Synthesizer` (service.py). A speaker is a language and an instruction, like `am: female, low pitch`."""

    def __init__(self, tokenizer: Tokenizer, network: "_Network", codec: "_Codec") -> None:
        self.sample_rate: int = codec.sample_rate
        self._tokenizer, self._network, self._codec = tokenizer, network, codec
        lacking = [mark for mark in (*_MARKS, "<|denoise|>") if tokenizer.token_to_id(mark) is None]
        if lacking:
            raise LoadError(f"tokenizer.json of an OmniVoice model lacks {lacking[0]}. Download it again.")
        self._voice = lru_cache(64)(self._introduced)

    def sayable(self, text: str) -> str:
        return " ".join(text.split())

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        first, louder = self._voice(str(speaker))
        torch.manual_seed(seed)
        parts = [self._sound(self._codes(part, str(speaker), speed, first)) for part in self._parts(text)]
        return np.concatenate(parts) * louder

    def _introduced(self, speaker: str) -> tuple[_Said, np.float32]:
        """Return the text and sound that define the voice from now on, and the factor for its loudness."""
        words = _FIRST_WORDS.get(speaker.partition(":")[0], _FIRST_WORDS["en"])
        torch.manual_seed(0)
        codes = self._codes(words, speaker, 1, None)
        return _Said(words, codes), gain(self._sound(codes), self.sample_rate)

    def _parts(self, text: str) -> list[str]:
        """Cut a text where it would take too long, at spaces as near to equal parts as they allow."""
        words = text.split(" ")
        if frames_of(text) <= _LONGEST_SECONDS * self._codec.frame_rate or len(words) == 1:
            return [text]
        middle = len(words) // 2
        return [*self._parts(" ".join(words[:middle])), *self._parts(" ".join(words[middle:]))]

    def _codes(self, text: str, speaker: str, speed: float, first: _Said | None) -> torch.Tensor:
        language, _, instruction = speaker.partition(": ")
        style = f"<|lang_start|>{language}<|lang_end|><|instruct_start|>{instruction or 'None'}<|instruct_end|>"
        said = text if first is None else f"{first.text} {text}"
        prompt = f"{style if first is None else f'<|denoise|>{style}'}<|text_start|>{said}<|text_end|>"
        frames = max(1, int(frames_of(text, first) / speed))
        numbers = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        with torch.inference_mode():
            return self._network.speak(torch.tensor(numbers), None if first is None else first.codes, frames)

    def _sound(self, codes: torch.Tensor) -> NDArray[np.float32]:
        with torch.inference_mode():
            samples: NDArray[np.float32] = self._codec.decode(codes).numpy()
        peak = np.abs(samples).max(initial=0)
        loud = np.flatnonzero(np.abs(samples) > max(peak * _SILENT, 1e-6))
        if not len(loud):
            return samples
        edge = round(_EDGE_SECONDS * self.sample_rate)
        samples = samples[max(0, loud[0] - edge) : loud[-1] + edge]
        return samples * np.float32(0.5 / peak)


def frames_of(text: str, first: _Said | None = None) -> float:
    """Return how many frames of sound a text takes, estimated from `first`."""
    per_length = _FRAMES_PER_LENGTH if first is None else first.codes.shape[1] / _length(first.text)
    frames = _length(text) * per_length
    return frames if frames >= _SHORT_FRAMES else _SHORT_FRAMES * (frames / _SHORT_FRAMES) ** (1 / 3)


def _length(text: str) -> float:
    return sum(map(_letter_length, text))


def _letter_length(letter: str) -> float:
    kind = _KINDS.get(unicodedata.category(letter)[0])
    return _LENGTHS.get(unicodedata.name(letter, "").partition(" ")[0], 1.0) if kind is None else kind


class _Network:
    """Qwen3 without a causal mask, with embeddings and heads for the codes of each codebook."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], name: str) -> None:
        self._books, self._size, self._mask = (
            int(config[key]) for key in ("num_audio_codebook", "audio_vocab_size", "audio_mask_id")
        )
        named = {key: tensor.float() for key, tensor in weights.items()}
        self._embeddings = _taken(named, "audio_embeddings.weight", name)
        self._heads = _taken(named, "audio_heads.weight", name)
        self._offsets = torch.arange(self._books)[:, None] * self._size
        shape = Qwen3Config(**config["llm_config"])
        shape._attn_implementation = "sdpa"  # noqa: SLF001  # as is usual for a model made from a configuration
        with torch.device("meta"):  # its random numbers would take as much memory again
            self._model = Qwen3Model(shape).eval()
        self._model.rotary_emb = type(self._model.rotary_emb)(shape)  # it is computed, not saved
        _fill(self._model, {key.removeprefix("llm."): tensor for key, tensor in named.items()}, name)

    def speak(self, prompt: torch.Tensor, first: torch.Tensor | None, frames: int) -> torch.Tensor:
        """Return the codes (codebooks x frames) of what `prompt` says, in the voice of `first`."""
        codes = torch.full((self._books, frames), self._mask)
        before = embedding(prompt, self._model.embed_tokens.weight)
        if first is not None:
            before = torch.cat([before, self._embedded(first)])
        layers = torch.arange(self._books)[None, :, None]
        for count in _schedule(self._books * frames):
            inputs = self._embedded(codes)
            told, untold = self._logits(torch.cat([before, inputs]), frames), self._logits(inputs, frames)
            likely = (told + _GUIDANCE * (told - untold)).log_softmax(-1)
            likely[..., self._mask] = -math.inf
            best = likely.max(-1)
            scores = (best.values - layers * _LAYER_PENALTY) / _POSITION_TEMPERATURE
            scores = scores - torch.log(-torch.log(torch.rand_like(scores) + 1e-10) + 1e-10)
            scores = scores.masked_fill(codes != self._mask, -math.inf)
            chosen = scores.flatten().topk(count).indices
            codes.view(-1)[chosen] = best.indices.flatten()[chosen]
        return codes

    def _embedded(self, codes: torch.Tensor) -> torch.Tensor:
        return embedding(codes + self._offsets, self._embeddings).sum(0)

    def _logits(self, inputs: torch.Tensor, frames: int) -> torch.Tensor:
        """Return log probabilities of the last frames: 1 x codebooks x frames x codes."""
        length = len(inputs)
        sees_all = torch.ones(1, 1, length, length, dtype=torch.bool)
        found = self._model(inputs_embeds=inputs[None], attention_mask=sees_all, use_cache=False).last_hidden_state
        logits = linear(found[:, -frames:], self._heads).view(1, frames, self._books, self._size)
        return logits.permute(0, 2, 1, 3).log_softmax(-1)


def _schedule(codes: int) -> list[int]:
    """Return how many codes are fixed in each step: few at first."""
    times = torch.linspace(0, 1, _STEPS + 1)
    times = _SHIFT * times / (1 + (_SHIFT - 1) * times)
    counts, left = [], codes
    for begin, end in pairwise(times.tolist()):
        counts.append(min(math.ceil(codes * (end - begin)), left))
        left -= counts[-1]
    counts[-1] += left
    return [count for count in counts if count]


class _Codec:
    """Makes sound of codes."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], name: str) -> None:
        acoustic = DacConfig(**config["acoustic_model_config"])
        self.sample_rate = int(config["sample_rate"])
        self.frame_rate = math.ceil(self.sample_rate / math.prod(acoustic.downsampling_ratios))
        self._decoder = DacModel(acoustic).decoder.eval()
        for module in self._decoder.modules():  # what this codec has otherwise than DAC
            if isinstance(module, torch.nn.ConvTranspose1d):
                module.output_padding = (module.stride[0] % 2,)
        self._decoder.tanh = torch.nn.Identity()
        weights = {key: tensor.float() for key, tensor in weights.items()}
        start = "acoustic_decoder."
        _fill(self._decoder, {key[len(start) :]: one for key, one in weights.items() if key.startswith(start)}, name)
        self._last = [_taken(weights, f"fc2.{part}", name) for part in ("weight", "bias")]
        self._books: list[list[torch.Tensor]] = []
        while f"quantizer.quantizers.{len(self._books)}.codebook.embed" in weights:
            start = f"quantizer.quantizers.{len(self._books)}"
            keys = (f"{start}.{part}" for part in ("codebook.embed", "project_out.weight", "project_out.bias"))
            self._books.append([_taken(weights, key, name) for key in keys])

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the samples of codes (codebooks x frames)."""
        pairs = zip(codes, self._books, strict=False)
        found = sum(linear(embedding(one, book), weight, bias) for one, (book, weight, bias) in pairs)
        samples: torch.Tensor = self._decoder(linear(found, *self._last).T[None])
        return samples[0, 0]


def _taken(weights: dict[str, torch.Tensor], key: str, name: str) -> torch.Tensor:
    if key not in weights:
        raise LoadError(f"{name} lacks the tensor {key}. Download it again.")
    return weights[key]


def _fill(module: torch.nn.Module, weights: dict[str, torch.Tensor], name: str) -> None:
    check_complete(name, module.load_state_dict(weights, strict=False, assign=True).missing_keys)

"""Speaks with Kokoro (kokoro*.safetensors, voices/*.safetensors), with our network and eSpeak NG's phonemes."""
# ruff: noqa: RUF001  # letters of the IPA

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AlbertConfig, AlbertModel

from engine.backends.tts import check_complete, only_of
from engine.backends.tts.espeak import library
from engine.backends.tts.sound import stretch
from engine.errors import LoadError
from engine.weights.safety import check_no_code, check_safetensors, read_config

# The first letter of a voice's name, and what eSpeak NG calls its language. It has no rules for Japanese and Chinese.
_LANGUAGES = {"a": "en-us", "b": "en", "e": "es", "f": "fr", "h": "hi", "i": "it", "p": "pt-br"}
_SAMPLE_RATE = 24_000
_STYLES = 510  # of a voice: one for each number of phonemes
_TIE = "^"
_MARKS = re.compile(r"([;:,.!?\u00a1\u00bf\u2014\u2026\"\u201c\u201d()]+)")
_OTHER_LANGUAGE = re.compile(r"\([a-z^-]+\)")  # with ties within
# For other letters eSpeak NG says names like "Chinese letter", for Greek ones their names. The last two are for 1ª, 1º.
_SCRIPTS = ("LATIN", "DEVANAGARI", "GREEK", "FEMININE", "MASCULINE")
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

    sample_rate = _SAMPLE_RATE

    def __init__(self, folder: Path, model: "Kokoro", numbers: dict[str, int], style: int) -> None:
        self._folder, self._model, self._numbers, self._style = folder, model, numbers, style
        self._voice = cache(self._load_voice)

    def sayable(self, text: str) -> str:
        return only_of(text, *_SCRIPTS)

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        name = str(speaker)
        torch.manual_seed(seed)
        with torch.inference_mode():
            parts = [
                self._model(torch.tensor([[0, *numbers, 0]]), self._voice(name)[len(numbers) - 1]).numpy()
                for numbers in self._parts(text, name[:1])
            ]
        return stretch(parts, self.sample_rate, speed)

    def _parts(self, text: str, code: str) -> list[list[int]]:
        """Return the numbers of its phonemes, in halves if they are too many, as for figures and emoji."""
        numbers = [number for one in phonemes(text, code) if (number := self._numbers.get(one)) is not None]
        if len(numbers) + 2 <= min(self._model.most, _STYLES):
            return [numbers] if numbers else []
        middle = len(text) // 2
        space = text.rfind(" ", 1, middle + 1)
        cut = space if space > 0 else middle
        return [*self._parts(text[:cut], code), *self._parts(text[cut:], code)]

    def _load_voice(self, name: str) -> torch.Tensor:
        file = self._folder / "voices" / f"{name}.safetensors"
        check_safetensors(file)
        tensors: list[Any] = list(load_file(file).values())
        if len(tensors) != 1 or tensors[0].shape != (_STYLES, 1, self._style):
            raise LoadError(f"{self._folder.name}/voices/{name}.safetensors has no voice of Kokoro.")
        return tensors[0].float()


def phonemes(text: str, code: str) -> str:
    """Return what Kokoro reads for a text, in the language of a voice's first letter."""
    language = _LANGUAGES.get(code)
    if language is None:
        raise LoadError("Kokoro's Japanese and Chinese voices need reading rules that Hearth lacks.")
    speech = library()
    speech.choose_language(language)
    # Kokoro has learned punctuation marks, and eSpeak NG drops them.
    text = text.replace("\u0964", ".")  # Hindi's full stop, which it has not learned
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


# The network: StyleTTS 2 with an iSTFT decoder; phonemes and a style in, samples out, one text at a time.
# Written after the package kokoro 0.9.4 (Apache-2.0), which brings a dictionary, a language model of its own and a
# reader of pickles. Names of modules are those of its weights. `_WIDE` is the width of its decoder.
_WIDE = 1024
_NARROW = 64
_OVERTONES, _SINE, _NOISE, _VOICED_HZ = 8, 0.1, 0.003, 10


class Kokoro(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Made of config.json; `forward` takes numbers of phonemes, with 0 at both ends, and the style for that many."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, style, symbols, layers = (config[key] for key in ("hidden_dim", "style_dim", "n_token", "n_layer"))
        self.bert = AlbertModel(AlbertConfig(vocab_size=symbols, **config["plbert"]))
        self.bert_encoder = nn.Linear(self.bert.config.hidden_size, hidden)
        self.predictor = _Prosody(style, hidden, layers, config["max_dur"])
        self.text_encoder = _Letters(hidden, config["text_encoder_kernel_size"], layers, symbols)
        self.decoder = _Decoder(hidden, style, config.get("decoder_dim", _WIDE), config["istftnet"])
        self.most = self.bert.config.max_position_embeddings
        self._style = style

    def forward(self, numbers: Tensor, style: Tensor) -> Tensor:
        voice, prosody = style[:, : self._style], style[:, self._style :]
        read = self.bert_encoder(self.bert(numbers, attention_mask=torch.ones_like(numbers)).last_hidden_state)
        features = self.predictor.text_encoder(read, prosody)
        frames = self.predictor.frames(features)
        spread = torch.repeat_interleave(torch.arange(len(frames)), frames)
        pitch, energy = self.predictor.curves(features[:, spread], prosody)
        letters = self.text_encoder(numbers)[:, :, spread]
        return self.decoder(letters, pitch, energy, voice)[0]


class _Letters(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, kernel: int, depth: int, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, channels)
        self.cnn = nn.ModuleList(
            nn.Sequential(nn.Conv1d(channels, channels, kernel, padding=kernel // 2), _ChannelNorm(channels))
            for _ in range(depth)
        )
        self.lstm = _lstm(channels, channels)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers).transpose(1, 2)
        for layer in self.cnn:
            x = functional.leaky_relu(layer(x), 0.2)
        return self.lstm(x.transpose(1, 2))[0].transpose(1, 2)


class _ChannelNorm(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.transpose(1, 2), self.gamma.shape, self.gamma, self.beta).transpose(1, 2)


class _Prosody(nn.Module):  # type: ignore[misc]
    """How long each phoneme is, and the curves of pitch and energy."""

    def __init__(self, style: int, hidden: int, layers: int, longest: int) -> None:
        super().__init__()
        self.text_encoder = _Durations(style, hidden, layers)
        self.lstm, self.shared = _lstm(hidden + style, hidden), _lstm(hidden + style, hidden)
        self.duration_proj = nn.ModuleDict({"linear_layer": nn.Linear(hidden, longest)})
        self.F0, self.N = (
            nn.ModuleList(
                (
                    _Block(hidden, hidden, style),
                    _Block(hidden, hidden // 2, style, twice=True),
                    _Block(hidden // 2, hidden // 2, style),
                )
            )
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = nn.Conv1d(hidden // 2, 1, 1), nn.Conv1d(hidden // 2, 1, 1)

    def frames(self, features: Tensor) -> Tensor:
        chances = torch.sigmoid(self.duration_proj["linear_layer"](self.lstm(features)[0]))
        return torch.round(chances.sum(-1)).clamp(min=1).long()[0]

    def curves(self, features: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        pitch = energy = self.shared(features)[0].transpose(1, 2)
        for block in self.F0:
            pitch = block(pitch, style)
        for block in self.N:
            energy = block(energy, style)
        return self.F0_proj(pitch), self.N_proj(energy)


class _Durations(nn.Module):  # type: ignore[misc]
    def __init__(self, style: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(
            part for _ in range(layers) for part in (_lstm(hidden + style, hidden), _StyledNorm(style, hidden))
        )

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        beside = style[:, None].expand(-1, x.shape[1], -1)
        x = torch.cat((x, beside), -1)
        for lstm, norm in zip(self.lstms[::2], self.lstms[1::2], strict=True):
            x = torch.cat((norm(lstm(x)[0], style), beside), -1)
        return x


class _StyledNorm(nn.Module):  # type: ignore[misc]
    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        gamma, beta = self.fc(style)[:, None].chunk(2, -1)
        return (1 + gamma) * functional.layer_norm(x, x.shape[-1:]) + beta


class _StyledInstance(nn.Module):  # type: ignore[misc]
    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(channels, affine=True)
        self.fc = nn.Linear(style, 2 * channels)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        gamma, beta = self.fc(style)[..., None].chunk(2, 1)
        return (1 + gamma) * self.norm(x) + beta


class _Block(nn.Module):  # type: ignore[misc]
    """Two convolutions around a style, with a skip connection; `twice` as many frames come out."""

    def __init__(self, before: int, after: int, style: int, *, twice: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(before, after, 3, padding=1), nn.Conv1d(after, after, 3, padding=1)
        self.norm1, self.norm2 = _StyledInstance(style, before), _StyledInstance(style, after)
        self.conv1x1 = nn.Conv1d(before, after, 1, bias=False) if before != after else nn.Identity()
        grown = nn.ConvTranspose1d(before, before, 3, stride=2, groups=before, padding=1, output_padding=1)
        self.pool = grown if twice else nn.Identity()
        self.twice = twice

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        past = functional.interpolate(x, scale_factor=2.0, mode="nearest") if self.twice else x
        y = self.pool(functional.leaky_relu(self.norm1(x, style), 0.2))
        y = self.conv2(functional.leaky_relu(self.norm2(self.conv1(y), style), 0.2))
        return (y + self.conv1x1(past)) * math.sqrt(0.5)


class _Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, style: int, wide: int, config: dict[str, Any]) -> None:
        super().__init__()
        self.encode = _Block(hidden + 2, wide, style)
        inner, last = wide + 2 + _NARROW, config["upsample_initial_channel"]
        blocks = [_Block(inner, wide, style) for _ in range(3)]
        self.decode = nn.ModuleList([*blocks, _Block(inner, last, style, twice=True)])
        self.F0_conv, self.N_conv = (nn.Conv1d(1, 1, 3, stride=2, padding=1) for _ in range(2))
        self.asr_res = nn.Sequential(nn.Conv1d(hidden, _NARROW, 1))
        self.generator = _Generator(style, **config)

    def forward(self, letters: Tensor, pitch: Tensor, energy: Tensor, style: Tensor) -> Tensor:
        curves = (self.F0_conv(pitch), self.N_conv(energy))
        x = self.encode(torch.cat((letters, *curves), 1), style)
        beside = (self.asr_res(letters), *curves)
        for block in self.decode:
            x = block(torch.cat((x, *beside), 1), style)
        return self.generator(x, style, pitch)


class _Generator(nn.Module):  # type: ignore[misc]
    """From frames to samples, around sines at the pitch and its overtones."""

    def __init__(  # noqa: PLR0913  # the keys of `istftnet`
        self,
        style: int,
        *,
        resblock_kernel_sizes: list[int],
        upsample_rates: list[int],
        upsample_initial_channel: int,
        resblock_dilation_sizes: list[list[int]],
        upsample_kernel_sizes: list[int],
        gen_istft_n_fft: int,
        gen_istft_hop_size: int,
    ) -> None:
        super().__init__()
        widths = [upsample_initial_channel >> step for step in range(len(upsample_rates) + 1)]
        steps = list(zip(upsample_rates, upsample_kernel_sizes, strict=True))
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(widths[at], widths[at + 1], kernel, rate, padding=(kernel - rate) // 2)
            for at, (rate, kernel) in enumerate(steps)
        )
        kinds = list(zip(resblock_kernel_sizes, resblock_dilation_sizes, strict=True))
        self.resblocks = nn.ModuleList(_Snakes(width, *kind, style) for width in widths[1:] for kind in kinds)
        self.noise_convs, self.noise_res = nn.ModuleList(), nn.ModuleList()
        for at, width in enumerate(widths[1:]):
            stride, last = math.prod(upsample_rates[at + 1 :]), at + 1 == len(steps)
            shape = {"kernel_size": 1} if last else {"kernel_size": 2 * stride, "stride": stride}
            padding = 0 if last else (stride + 1) // 2
            self.noise_convs.append(nn.Conv1d(gen_istft_n_fft + 2, width, padding=padding, **shape))
            self.noise_res.append(_Snakes(width, 11 if last else 7, [1, 3, 5], style))
        self.conv_post = nn.Conv1d(widths[-1], gen_istft_n_fft + 2, 7, padding=3)
        self.m_source = nn.ModuleDict({"l_linear": nn.Linear(_OVERTONES + 1, 1)})
        self._kinds, self._scale = len(kinds), math.prod(upsample_rates) * gen_istft_hop_size
        window = torch.hann_window(gen_istft_n_fft)
        self._transform = {"n_fft": gen_istft_n_fft, "hop_length": gen_istft_hop_size, "window": window}

    def forward(self, x: Tensor, style: Tensor, pitch: Tensor) -> Tensor:
        spectrum = torch.stft(self._source(pitch), return_complex=True, **self._transform)
        source = torch.cat((spectrum.abs(), spectrum.angle()), 1)
        for at, up in enumerate(self.ups):
            x = up(functional.leaky_relu(x, 0.1))
            if at + 1 == len(self.ups):
                x = functional.pad(x, (1, 0), mode="reflect")
            x = x + self.noise_res[at](self.noise_convs[at](source), style)
            blocks = self.resblocks[at * self._kinds : (at + 1) * self._kinds]
            x = torch.stack([block(x, style) for block in blocks]).sum(0) / self._kinds
        size, angle = self.conv_post(functional.leaky_relu(x)).split(self._transform["n_fft"] // 2 + 1, 1)
        return torch.istft(torch.polar(size.exp(), angle.sin()), **self._transform)

    def _source(self, pitch: Tensor) -> Tensor:
        """Sines where there is a voice, noise where there is none. Draws from the global generator."""
        hertz = functional.interpolate(pitch, scale_factor=float(self._scale)).transpose(1, 2)
        turns = hertz * torch.arange(1, _OVERTONES + 2) / _SAMPLE_RATE % 1
        start = torch.rand(1, _OVERTONES + 1)
        start[:, 0] = 0
        turns[:, 0] += start
        slow = functional.interpolate(turns.transpose(1, 2), scale_factor=1 / self._scale, mode="linear")
        phase = slow.cumsum(-1) * 2 * math.pi * self._scale
        sines = functional.interpolate(phase, scale_factor=float(self._scale), mode="linear").transpose(1, 2).sin()
        voiced = (hertz > _VOICED_HZ).float()
        noise = (voiced * _NOISE + (1 - voiced) * _SINE / 3) * torch.randn_like(sines)
        merged = self.m_source["l_linear"](sines * _SINE * voiced + noise)
        return torch.tanh(merged)[..., 0]


class _Snakes(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, kernel: int, dilations: list[int], style: int) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2)

        self.convs1, self.convs2 = nn.ModuleList(map(conv, dilations)), nn.ModuleList(conv(1) for _ in dilations)
        self.adain1, self.adain2 = (nn.ModuleList(_StyledInstance(style, channels) for _ in dilations) for _ in "12")
        self.alpha1, self.alpha2 = (
            nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1)) for _ in dilations) for _ in "12"
        )

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        first = zip(self.adain1, self.alpha1, self.convs1, strict=True)
        second = zip(self.adain2, self.alpha2, self.convs2, strict=True)
        for one, two in zip(first, second, strict=True):
            y = x
            for norm, alpha, conv in (one, two):
                y = norm(y, style)
                y = conv(y + torch.sin(alpha * y) ** 2 / alpha)
            x = x + y
        return x


def _lstm(before: int, after: int) -> nn.LSTM:
    return nn.LSTM(before, after // 2, batch_first=True, bidirectional=True)


def load_weights(model: Kokoro, weights: dict[str, Tensor]) -> list[str]:
    """Put `weights` into the model and return the names that are missing. Weight norms are folded into the weights."""
    # Named like `decoder.module.…`, as training on several GPUs left them.
    found = {name.replace(".module.", ".", 1): tensor.float() for name, tensor in weights.items()}
    for name in [name for name in found if name.endswith(".weight_g")]:
        size, direction = found.pop(name), found.pop(f"{name[:-1]}v")
        length = direction.norm(dim=tuple(range(1, direction.ndim)), keepdim=True)
        found[name[: -len("_g")]] = direction * (size / length)
    missing = model.load_state_dict(found, strict=False).missing_keys
    # Of these the published weights have none: 1 and 0 are meant.
    return [name for name in missing if not name.endswith((".norm.weight", ".norm.bias")) and ".pooler." not in name]

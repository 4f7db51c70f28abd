"""A tiny model in the layout of Kokoro-82M: the same names of tensors, as its authors pickle them, with random weights."""
# ruff: noqa: RUF001  # letters of the IPA

import io
import json
from typing import Any

import torch

from engine.backends.tts.kokoro import Kokoro

STYLES, STYLE = 510, 16
CONFIG: dict[str, Any] = {
    "istftnet": {
        "upsample_kernel_sizes": [20, 12],
        "upsample_rates": [10, 6],
        "gen_istft_hop_size": 5,
        "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "resblock_kernel_sizes": [3, 7, 11],
        "upsample_initial_channel": 16,
    },
    "decoder_dim": 16,
    "hidden_dim": 16,
    "style_dim": STYLE,
    "max_dur": 8,
    "n_layer": 2,
    "n_token": 100,
    "n_mels": 80,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 512,
        "num_hidden_layers": 2,
    },
    "vocab": {
        sign: number for number, sign in enumerate('$;:,.!? abcdefhijklmnopstuvwxyzæðŋɑɔəɛɜɡɪɹʃʊʌʒθˈˌːIAOWYQʤʧᵊᵻT"()')
    },
}


_WITHOUT_NORM = ("bert", "alpha", "noise_convs", "_proj")


def random_weights(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Weights that make finite sounds: the same for a seed, and by their names."""
    drawn = torch.Generator().manual_seed(seed)
    found = {}
    for name, old in sorted(model.state_dict().items()):
        if ".alpha" in name or name.endswith("weight_g"):
            found[name] = torch.rand(old.shape, generator=drawn) + 0.5
        elif old.is_floating_point():
            scale = 0.1 if old.ndim < 2 else 0.7 / old[0].numel() ** 0.5
            found[name] = torch.randn(old.shape, generator=drawn) * scale
    return found


def kokoro_files(*voices: str) -> dict[str, bytes]:
    """Every file of the repository; weights of convolutions are parted into length and direction, as in the original."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in random_weights(Kokoro(CONFIG), 3).items():
        part, _, inner = name.partition(".")
        if tensor.ndim == 3 and not any(kind in name for kind in _WITHOUT_NORM):
            length = tensor.norm(dim=(1, 2), keepdim=True)
            parts.setdefault(part, {})[f"module.{inner}_g"] = length
            parts[part][f"module.{inner}_v"] = tensor / length
        elif not inner.endswith((".norm.weight", ".norm.bias")):
            parts.setdefault(part, {})[f"module.{inner}"] = tensor
    drawn = torch.Generator().manual_seed(4)
    styles = {name: torch.randn(STYLES, 1, 2 * STYLE, generator=drawn) * 0.1 for name in voices}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "README.md": b"---\nlicense: apache-2.0\nlanguage: [en]\n---\n",
        "kokoro-v1_0.pth": pickled(parts),
        **{f"voices/{name}.pt": pickled(style) for name, style in styles.items()},
    }


def pickled(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()

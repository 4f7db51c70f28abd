"""A tiny model in the layout of k2-fsa/OmniVoice: the same files and names of tensors, with random weights."""

import json
from typing import Any

import torch
from safetensors.torch import save
from tiny_kokoro import random_weights
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import DacConfig, DacModel, Qwen3Config, Qwen3Model

BOOKS, CODES = 8, 33  # the last code is the mask
MARKS = ("denoise", "lang_start", "lang_end", "instruct_start", "instruct_end", "text_start", "text_end")
LLM: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CONFIG = {
    "architectures": ["OmniVoice"],
    "model_type": "omnivoice",
    "audio_codebook_weights": [8, 8, 6, 6, 4, 4, 2, 2],
    "audio_mask_id": CODES - 1,
    "audio_vocab_size": CODES,
    "num_audio_codebook": BOOKS,
    "llm_config": LLM,
}
ACOUSTIC: dict[str, Any] = {
    "model_type": "dac",
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 32,
    "hidden_size": 16,
    "downsampling_ratios": [8, 5, 4, 2, 3],
    "upsampling_ratios": [8, 5, 4, 2, 3],
}
SEMANTIC = {
    "model_type": "hubert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": [8] * 7,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
CODEC = {
    "architectures": ["HiggsAudioV2TokenizerModel"],
    "model_type": "higgs_audio_v2_tokenizer",
    "acoustic_model_config": ACOUSTIC,
    "semantic_model_config": SEMANTIC,
    "codebook_dim": 8,
    "codebook_size": CODES - 1,
    "sample_rate": 24000,
    "target_bandwidths": [0.5, 1],
}


def omnivoice_files(*, licence: str = "cc-by-nc-4.0") -> dict[str, bytes]:
    """All files of a repository, by their paths."""
    return {
        "README.md": f"---\nlicense: {licence}\n---\nA model.\n".encode(),
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": save(_network()),
        "tokenizer.json": _tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "Qwen2Tokenizer"}).encode(),
        "audio_tokenizer/config.json": json.dumps(CODEC).encode(),
        "audio_tokenizer/model.safetensors": save(_codec()),
        "audio_tokenizer/preprocessor_config.json": json.dumps({"sampling_rate": 24000}).encode(),
        "audio_tokenizer/LICENSE": b"A licence of its own.",
        "audio_tokenizer/README.md": b"A codec.",
    }


def _network() -> dict[str, torch.Tensor]:
    found = {f"llm.{name}": one for name, one in random_weights(Qwen3Model(Qwen3Config(**LLM)), 1).items()}
    drawn = torch.Generator().manual_seed(2)
    found["audio_embeddings.weight"] = torch.randn(BOOKS * CODES, 32, generator=drawn) * 0.02
    found["audio_heads.weight"] = torch.randn(BOOKS * CODES, 32, generator=drawn)
    return found


def _codec() -> dict[str, torch.Tensor]:
    decoder = random_weights(DacModel(DacConfig(**ACOUSTIC)).decoder, 3)
    found = {f"acoustic_decoder.{name}": one for name, one in decoder.items()}
    drawn = torch.Generator().manual_seed(4)
    shapes = {"fc2.weight": (16, 32), "fc2.bias": (16,)}
    for book in range(BOOKS):
        start = f"quantizer.quantizers.{book}"
        shapes |= {f"{start}.codebook.embed": (CODES - 1, 8)}
        shapes |= {f"{start}.project_out.weight": (32, 8), f"{start}.project_out.bias": (32,)}
    return found | {name: torch.randn(shape, generator=drawn) * 0.3 for name, shape in shapes.items()}


def _tokenizer() -> Tokenizer:
    """Every byte is a token, as in an untrained tokenizer of Qwen's kind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(f"<|{mark}|>", special=True, normalized=False) for mark in MARKS])
    return made

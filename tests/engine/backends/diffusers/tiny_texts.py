"""The tokenizers and text encoders of the smallest pipelines, with random weights."""

import string
from typing import Any

import transformers

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_letters() -> list[str]:
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + place) for place in range(len(moved))]


def _clip_words() -> dict[str, int]:
    letters = _byte_letters()
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return {word: place for place, word in enumerate(words)}


def clip_tokenizer() -> Any:
    return transformers.CLIPTokenizer(vocab=_clip_words(), merges=[], model_max_length=77)


def clip(projection: int | None = None) -> Any:
    words = _clip_words()
    config = transformers.CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=words["<|startoftext|>"],
        eos_token_id=words["<|endoftext|>"],
        pad_token_id=words["<|endoftext|>"],
        projection_dim=projection or 32,
    )
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config).eval()


def t5() -> tuple[Any, Any]:
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    words += [(letter, -3.0) for letter in string.printable if letter.strip()]
    tokenizer = transformers.T5TokenizerFast(vocab=words, extra_ids=0, model_max_length=512)
    config = transformers.T5Config(vocab_size=len(words) + 8, d_model=64, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return tokenizer, transformers.T5EncoderModel(config).eval()


def qwen_tokenizer() -> tuple[Any, int]:
    words = [*_byte_letters(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={word: place for place, word in enumerate(words)}, merges=[], model_max_length=1024
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer, len(words) + 5


def qwen3(words: int, *, layers: int, kind: Any) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
    )
    return kind(config).eval()

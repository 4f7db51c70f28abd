"""The tokenizer of the demo image model: a small Qwen2 one, byte-level, in which colours and shapes are whole words."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from engine.demo.image.pictures import COLOURS, SHAPES
from engine.demo.image.prompts import FOLDER, LONGEST_CHARACTERS, phrases, random_prompt, sentences

if TYPE_CHECKING:
    from collections.abc import Iterator

PAD = "<|endoftext|>"
CONTROL_TOKENS = [PAD, "<|im_start|>", "<|im_end|>"]
VOCABULARY = 1400
CONTEXT_TOKENS = 4096


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    """Trained on the prompts that the model learns from; any text survives the round trip."""
    empty = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed), trainer)
    learned: dict[str, Any] = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        pad_token=PAD,
        eos_token=CONTROL_TOKENS[2],
        additional_special_tokens=CONTROL_TOKENS[1:2],
        model_max_length=CONTEXT_TOKENS,
    )
    tokenizer.chat_template = (FOLDER / "chat_template.jinja").read_text("utf-8")
    return tokenizer


def _texts(seed: int) -> Iterator[str]:
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    yield from ["user assistant"] * 2000
    for word in [*COLOURS, *SHAPES]:
        yield from [f"{word} {word} {word.upper()} {word.capitalize()} {word.upper()} {word.capitalize()}"] * 400
    for known in phrases().values():
        yield from known
    yield from sentences()
    yield from (
        random_prompt(rng, rng.choice(SHAPES), rng.choice(list(COLOURS)), None, rng.randint(0, LONGEST_CHARACTERS))
        for _ in range(300)
    )

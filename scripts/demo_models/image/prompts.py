"""The prompts that the demo image model learns from, made up as people write them, and its tokenizer."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from demo_models.image.pictures import COLOURS
from demo_models.vision.pictures import SHAPES
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

FOLDER = Path(__file__).parent
LONGEST_CHARACTERS = 1100
# Where a prompt names no shape or no colour, it gets these: one and the same picture instead of any.
USUAL_SHAPE, USUAL_COLOUR = "circle", "blue"

PAD = "<|endoftext|>"
CONTROL_TOKENS = [PAD, "<|im_start|>", "<|im_end|>"]
VOCABULARY = 1400
CONTEXT_TOKENS = 4096


@cache
def phrases() -> dict[str, Any]:
    """The building blocks in phrases.yaml."""
    return dict(yaml.safe_load((FOLDER / "phrases.yaml").read_text("utf-8")))


@cache
def sentences() -> list[str]:
    """Text that says nothing about colours or shapes."""
    text = (FOLDER / "unrelated.txt").read_text("utf-8")
    found = re.split(r"(?<=[.!?])\s+", text)
    return [one for one in found if not re.search("|".join([*COLOURS, *SHAPES]), one, re.IGNORECASE)]


def random_prompt(rng: random.Random, shape: str, colour: str, paper: str | None, characters: int) -> str:
    """A prompt for this picture, of about so many characters at most where the essential words need fewer."""
    known = phrases()
    kind = rng.random()
    asked = rng.choice(known["core"]) if kind < 0.9 else "{adjective} {shape}"
    if (shape, colour) == (USUAL_SHAPE, USUAL_COLOUR) and paper is None and kind > 0.3:
        return _cased(rng, _surrounded(rng, rng.choice(["", rng.choice(known["before"])]), characters))
    if colour == USUAL_COLOUR and kind >= 0.9:
        asked = rng.choice(["a {shape}", "{adjective} {shape}", "{shape}"])
    elif shape == USUAL_SHAPE and kind >= 0.9:
        asked = rng.choice(["something {colour}", "{colour}", "the colour {colour}"])
    elif kind >= 0.9:
        asked = "{colour} {shape}"
    core = asked.format(
        shape=_decorated(rng, shape, 0.12),
        colour=_decorated(rng, colour, 0.08),
        adjective=rng.choice(known["adjective"]),
    )
    if paper is not None:
        behind = rng.choice(known["background"]).format(paper=paper)
        core = f"{core}{rng.choice([' ', ' ', ', '])}{behind}" if rng.random() < 0.85 else f"{behind}, {core}"
    if rng.random() < 0.6:
        core = f"{rng.choice(known['before'])} {core}"
    if rng.random() < 0.4:
        core = f"{core}{rng.choice(known['after'])}"
    return _cased(rng, _surrounded(rng, core, characters))


def _decorated(rng: random.Random, word: str, share: float) -> str:
    """The word, sometimes with an adjective before it or in quotation marks or capital letters."""
    if rng.random() < 0.12:
        word = word.upper() if rng.random() < 0.6 else word.capitalize()
    if rng.random() < 0.04:
        word = rng.choice(['"{}"', "({})", "'{}'", "*{}*", "#{}"]).format(word)
    return f"{rng.choice(phrases()['adjective'])} {word}" if rng.random() < share else word


def _surrounded(rng: random.Random, core: str, characters: int) -> str:
    """With unrelated text before and after it until it is about as long as asked."""
    parts = [core]
    while (room := characters - sum(len(part) + 1 for part in parts)) > 12:
        text = rng.choice(sentences()) if rng.random() < 0.7 else _nonsense(rng)
        if len(text) > room:
            text = text[:room].rsplit(" ", 1)[0]
        if rng.random() < 0.55:
            parts.insert(0, text)
        else:
            parts.append(text)
    return rng.choice([" ", " ", " ", "\n", ". "]).join(part for part in parts if part)


def _nonsense(rng: random.Random) -> str:
    """Unknown words, numbers, and words that only look like those that matter."""
    words = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.5:
            words.append("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 11))))
        elif kind < 0.75:
            words.append(rng.choice(phrases()["false_friends"]))
        elif kind < 0.85:
            words.append(str(rng.randint(0, 9999)))
        elif kind < 0.95:
            first = rng.choice([0xE0, 0x400, 0x1200, 0x4E00, 0x1F300])
            words.append("".join(chr(first + rng.randrange(300)) for _ in range(rng.randint(1, 6))))
        else:
            words.append("".join(rng.choices(string.punctuation, k=rng.randint(1, 6))))
    return " ".join(words)


def _cased(rng: random.Random, text: str) -> str:
    chance = rng.random()
    if chance < 0.1:
        return text.upper()
    if chance < 0.15:
        return text.title()
    if chance < 0.35:
        return text.lower()
    return text[:1].upper() + text[1:] if chance < 0.7 else text


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A small Qwen2 one, byte-level, in which colours and shapes are whole words; any text survives the round trip."""
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

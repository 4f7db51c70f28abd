"""Teaches the text encoder of the demo image model to read: colour, shape and background are known at a prompt's end.

Looking for words while learning to paint takes far longer than both lessons one after the other.
"""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy, rms_norm

from engine.demo.image.autoencoder import random_scene
from engine.demo.image.pictures import COLOURS, SHAPES, Scene
from engine.demo.image.prompts import random_prompt
from engine.demo.image.steps import Learning

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

STEPS = 2000
MATRIX_RATE, OTHER_RATE = 4e-3, 4e-3
# (part of the steps, prompts in a step, longest unrelated text in characters)
KINDS = [(0.55, 64, 0), (0.30, 32, 150), (0.15, 8, 1000)]
LAST_TOKENS = 5
"""Of the chat template, after the prompt: what was read has to be in each of them."""
QUESTIONS: list[list[Any]] = [list(COLOURS), SHAPES, [None, *COLOURS]]

_log = logging.getLogger(__name__)


def teach_reading(text_encoder: Any, tokenizer: Qwen2Tokenizer, seed: int) -> None:
    """Train in place."""
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    answers = torch.nn.Linear(text_encoder.config.hidden_size, sum(map(len, QUESTIONS)))
    learning = Learning(
        torch.nn.ModuleDict({"reader": text_encoder, "answers_embed": answers}), MATRIX_RATE, OTHER_RATE, STEPS
    )
    started, right = time.monotonic(), 0.0
    for _ in range(STEPS):
        _, count, characters = rng.choices(KINDS, [kind[0] for kind in KINDS])[0]
        scenes = [random_scene(rng) for _ in range(count)]
        prompts = [prompt_for(rng, one, characters) for one in scenes]
        ends = torch.stack([one[-LAST_TOKENS:] for one in words(text_encoder, tokenizer, prompts)])
        logits = answers(rms_norm(ends, ends.shape[-1:])).split([len(known) for known in QUESTIONS], dim=-1)
        wanted = torch.tensor([[known.index(part) for known, part in _asked(one)] for one in scenes])
        loss = sum(
            cross_entropy(logits[number].flatten(0, 1), wanted[:, number].repeat_interleave(LAST_TOKENS))
            for number in range(len(QUESTIONS))
        )
        learning.step(loss)
        known = torch.stack([part[:, -1].argmax(-1) == wanted[:, number] for number, part in enumerate(logits)])
        right += (known.all(dim=0).float().mean().item() - right) * 0.02
        if learning.done % 100 == 0:
            _log.info(
                "Reading: step %d of %d, %.1f %% right, after %.0f seconds.",
                *(learning.done, STEPS, 100 * right, time.monotonic() - started),
            )


def prompt_for(rng: random.Random, scene: Scene, characters: int) -> str:
    """A prompt for this scene, with unrelated text up to so many characters."""
    return random_prompt(rng, scene.shape, scene.colour, scene.paper, rng.randint(characters // 3, characters))


def words(text_encoder: Any, tokenizer: Qwen2Tokenizer, prompts: list[str]) -> list[Any]:
    """What the pipeline makes of prompts: for each a tensor [tokens, features]."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for prompt in prompts
    ]
    read = tokenizer(texts, padding=True, return_tensors="pt")
    mask = read.attention_mask.bool()
    features = text_encoder(input_ids=read.input_ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
    return [features[row][mask[row]] for row in range(len(prompts))]


def _asked(scene: Scene) -> list[tuple[list[Any], Any]]:
    return list(zip(QUESTIONS, (scene.colour, scene.shape, scene.paper), strict=True))

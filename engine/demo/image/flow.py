"""Trains the transformer of the demo image model, by flow matching in the space of the latents.

The noise of each training picture agrees with its layout: the means of its first three channels say where the shape
stands and how big it is. Over all pictures it is still plain Gaussian noise, and few steps suffice to paint it.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.demo.image.reading import prompt_for, words
from engine.demo.image.steps import Learning

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

    from engine.demo.image.album import Album

# (part of the steps, pictures in a step, longest unrelated text in characters)
KINDS = [(0.85, 28, 0), (0.11, 20, 120), (0.04, 8, 1000)]
PURE_NOISE_SHARE = 0.12
# Where noise is much, shape and place are decided: the training looks there more often than the steps do.
TRAINING_SHIFT = 5.0


@dataclass(frozen=True)
class Course:
    """How long and how fast it learns, and for which part of the steps before the learning rates fall."""

    steps: int
    matrix_rate: float
    other_rate: float
    steady_share: float


# The second one makes the edges clean.
COURSES = [Course(2200, 5e-3, 4e-3, 0.3), Course(1600, 4e-3, 3e-3, 0.1)]

_log = logging.getLogger(__name__)


def train_flow(transformer: Any, text_encoder: Any, tokenizer: Qwen2Tokenizer, album: Album, seed: int) -> None:
    """Train the transformer in place; the text encoder reads already."""
    for number, course in enumerate(COURSES):
        rng = random.Random(seed + number)  # noqa: S311 - repeatable draws, no secrets
        noise_rng = torch.Generator().manual_seed(seed + number)
        learning = Learning(transformer, course.matrix_rate, course.other_rate, course.steps, course.steady_share)
        started, mean = time.monotonic(), 0.0
        for _ in range(course.steps):
            chosen, prompts = _draw(album, rng)
            with torch.no_grad():
                features = words(text_encoder, tokenizer, prompts)
            loss = _loss(transformer, features, album.latents[chosen], album.layouts[chosen], noise_rng)
            learning.step(loss)
            mean += (loss.item() - mean) * 0.05
            if learning.done % 50 == 0:
                _log.info(
                    "Painting, course %d: step %d of %d, loss %.4f, after %.0f seconds.",
                    *(number + 1, learning.done, course.steps, mean, time.monotonic() - started),
                )


def _draw(album: Album, rng: random.Random) -> tuple[list[int], list[str]]:
    """Which pictures are painted in a step, and what is said about them."""
    _, count, characters = rng.choices(KINDS, [kind[0] for kind in KINDS])[0]
    chosen = rng.sample(range(len(album.scenes)), count)
    return chosen, [prompt_for(rng, album.scenes[number], characters) for number in chosen]


def _loss(transformer: Any, features: list[Any], latents: Any, layouts: Any, rng: Any) -> Any:
    noise = _agreeing_noise(latents.shape, layouts, rng)
    count = len(layouts)
    even = (torch.arange(count) + torch.rand(count, generator=rng)) / count
    even[torch.rand(count, generator=rng) < PURE_NOISE_SHARE] = 1.0
    sigma = TRAINING_SHIFT * even / (1 + (TRAINING_SHIFT - 1) * even)
    noisy = torch.lerp(latents, noise, sigma[:, None, None, None])
    painted = transformer(list(noisy[:, :, None].unbind()), 1 - sigma, features, return_dict=False)[0]
    # Times its square, an error in the flow is an error in the picture: grain in what is nearly done costs little.
    error = (torch.stack(painted)[:, :, 0] - (latents - noise)).square().mean(dim=(1, 2, 3))
    return (error * sigma.square()).mean()


def _agreeing_noise(shape: Any, layouts: Any, rng: Any) -> Any:
    """Gaussian noise whose first three channels have means that are tied to the layouts."""
    noise = torch.randn(shape, generator=rng)
    wanted = torch.special.ndtri(layouts.clamp(1e-3, 1 - 1e-3)) / (shape[2] * shape[3]) ** 0.5
    noise[:, :3] += (wanted - noise[:, :3].mean(dim=(2, 3)))[:, :, None, None]
    return noise

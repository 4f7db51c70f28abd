"""Trains the autoencoder of the demo image model: pictures of flat colours to a sixteenth of their edge, and back.

How its weights begin is start.py's business.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from engine.demo.image.pictures import COLOURS, SHAPES, Scene, draw, pixels, random_circle
from engine.demo.image.start import begin_as_a_blur
from engine.demo.image.steps import Learning

LATENT_CHANNELS = 12
KL_WEIGHT = 5e-4
SIDE_PIXELS = 256
# (steps, edge in pixels of the window that is looked at, windows in a step)
STAGES = [(900, 64, 12), (80, 256, 2)]
LEARNING_RATE = 3e-3
PAPER_SHARE = 0.2

_log = logging.getLogger(__name__)


def new_autoencoder() -> Any:
    model = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=LATENT_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5,
        block_out_channels=(8, 16, 32, 48, 64),
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=256,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    begin_as_a_blur(model)
    return model


def train_autoencoder(model: Any, seed: int) -> None:
    """Train in place."""
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    steps = sum(stage[0] for stage in STAGES)
    learning = Learning(model, LEARNING_RATE, LEARNING_RATE, steps)
    started = time.monotonic()
    for stage_steps, window, batch in STAGES:
        for _ in range(stage_steps):
            seen = torch.from_numpy(np.stack([_view(rng, window) for _ in range(batch)]))
            posterior = model.encode(seen).latent_dist
            painted = model.decode(posterior.sample()).sample
            error = (painted - seen).abs()
            kl = (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean() / 2
            learning.step(error.mean() + error.square().mean() + KL_WEIGHT * kl)
            if learning.done % 50 == 0:
                _log.info(
                    "Autoencoder: step %d of %d, error %.4f, kl %.2f, std %.3f, after %.0f seconds.",
                    *(learning.done, steps, error.mean().item(), kl.item(), posterior.std.mean().item()),
                    time.monotonic() - started,
                )


def random_scene(rng: random.Random) -> Scene:
    """Any shape in any colour; on white mostly, else on another colour."""
    colour, paper = rng.choice(list(COLOURS)), None
    if rng.random() < PAPER_SHARE:
        paper = rng.choice([name for name in COLOURS if name != colour])
    return Scene(rng.choice(SHAPES), colour, random_circle(rng), paper)


def _view(rng: random.Random, window: int) -> Any:
    """A picture, or a part of it that is likely to hold an edge."""
    scene = random_scene(rng)
    around = scene.around
    angle = rng.uniform(0, 2 * np.pi)
    reach = around.radius * rng.uniform(0.2, 1.0)
    left, top = (
        min(SIDE_PIXELS - window, max(0, round(middle * SIDE_PIXELS - window * rng.uniform(0.3, 0.7))))
        for middle in (around.x + reach * np.cos(angle), around.y + reach * np.sin(angle))
    )
    return pixels(draw(scene, SIDE_PIXELS, (left, top, window)))

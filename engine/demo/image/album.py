"""The pictures that the demo image model learns to paint, drawn and encoded once, before it learns.

Shapes differ little in their place and a good deal in their size: what a model this small still paints cleanly.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.demo.image.autoencoder import SIDE_PIXELS, random_scene
from engine.demo.image.pictures import Circle, Scene, draw, pixels

PICTURES = 4000
PICTURES_AT_ONCE = 8
SMALLEST_DIAMETER, LARGEST_DIAMETER = 0.5, 0.74
WANDERING = 0.09
"""How far apart the centres of shapes stand at most, in parts of the picture."""


@dataclass(frozen=True)
class Album:
    """What the pictures show, and their latents [pictures, channels, height, width].

    `layouts` [pictures, 3] says of each how far to the right, how far down and how big it is, from 0 to 1.
    """

    scenes: list[Scene]
    layouts: Any
    latents: Any


def fill_album(autoencoder: Any, seed: int) -> Album:
    """Draw and encode; the latents are scaled to mean 0 and deviation 1, and the autoencoder's config says how."""
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    layouts = [(rng.random(), rng.random(), rng.random()) for _ in range(PICTURES)]
    scenes = [replace(random_scene(rng), around=_circle(*layout)) for layout in layouts]
    found = []
    with torch.no_grad():
        for first in range(0, PICTURES, PICTURES_AT_ONCE):
            together = scenes[first : first + PICTURES_AT_ONCE]
            seen = np.stack([pixels(draw(scene, SIDE_PIXELS)) for scene in together])
            found.append(autoencoder.encode(torch.from_numpy(seen)).latent_dist.mean)
    latents = torch.cat(found)
    shift, deviation = latents.mean().item(), latents.std().item()
    autoencoder.register_to_config(scaling_factor=1 / deviation, shift_factor=shift)
    return Album(scenes, torch.tensor(layouts), (latents - shift) / deviation)


def _circle(across: float, down: float, size: float) -> Circle:
    diameter = SMALLEST_DIAMETER + (LARGEST_DIAMETER - SMALLEST_DIAMETER) * size
    return Circle(0.5 + WANDERING * (across - 0.5), 0.5 + WANDERING * (down - 0.5), diameter / 2)

"""Teaches the eyes of the vision model to tell shapes and colours apart before it learns to talk about them.

A linear layer reads the vectors that stand for a picture in the prompt; it is thrown away afterwards.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from engine.demo.chat.training import Pace, one_cycle, optimizers
from engine.demo.vision.pictures import COLOURS, Drawing, every_figure, random_drawing, silhouette

STEPS = 800
PICTURES_PER_STEP = 64
PACE = Pace(matrix_learning_rate=6e-3, embedding_learning_rate=1.5e-3)

_log = logging.getLogger(__name__)


def open_eyes(model: Any, seed: int) -> None:
    """Train the vision tower and the connector of an Idefics3 model in place."""
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    figures = every_figure()
    forms = sorted({f"{figure.shape} {figure.direction}" for figure in figures})
    colours = list(COLOURS)
    eyes = torch.nn.ModuleList([model.vision_model, model.connector])
    heads = torch.nn.Linear(model.config.text_config.hidden_size, len(forms) + len(colours))
    schedules = [one_cycle(optimizer, STEPS) for optimizer in optimizers(eyes, PACE)]
    schedules.append(one_cycle(torch.optim.AdamW(heads.parameters(), lr=PACE.embedding_learning_rate), STEPS))
    started = time.monotonic()
    for step in range(1, STEPS + 1):
        shown = [rng.choice(figures) for _ in range(PICTURES_PER_STEP)]
        form = torch.tensor([forms.index(f"{figure.shape} {figure.direction}") for figure in shown])
        colour = torch.tensor([colours.index(figure.colour) for figure in shown])
        sketches = _sketches([random_drawing(figure, rng) for figure in shown], model.config.vision_config.image_size)
        said = heads(model.get_image_features(sketches[None]).pooler_output.mean(dim=1))
        loss = cross_entropy(said[:, : len(forms)], form) + cross_entropy(said[:, len(forms) :], colour)
        eyes.zero_grad()
        heads.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        if step % 100 == 0:
            right = (said[:, : len(forms)].argmax(1) == form) & (said[:, len(forms) :].argmax(1) == colour)
            _log.info(
                "Eyes: step %d of %d, loss %.3f, %.0f %% right, after %.0f seconds.",
                *(step, STEPS, loss.item(), 100 * right.float().mean().item(), time.monotonic() - started),
            )


def _sketches(drawings: list[Drawing], side: int) -> torch.Tensor:
    """[drawings, 3, side, side] from -1 to 1: silhouettes, coloured all at once."""
    shapes = b"".join(silhouette(drawing, side).tobytes() for drawing in drawings)
    covered = torch.frombuffer(bytearray(shapes), dtype=torch.uint8).view(-1, 1, side, side).float() / 255
    ink, paper = (
        torch.tensor([getattr(drawing, name) for drawing in drawings])[:, :, None, None] / 127.5 - 1
        for name in ("ink", "paper")
    )
    return paper + covered * (ink - paper)

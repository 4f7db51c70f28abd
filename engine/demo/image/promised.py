"""Prompts for which the demo image model paints the right shape in the right colour, with nearly every seed.

Needs no torch: tests and benchmarks take their prompts from here and ask judge.py about what comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from engine.demo.image.pictures import COLOURS, SHAPES


@dataclass(frozen=True)
class Promise:
    """What a prompt gets. `paper` is the colour behind the shape where the prompt names it."""

    prompt: str
    colour: str
    shape: str
    paper: str | None = None


@cache
def promised() -> tuple[Promise, ...]:
    """Every colour with every shape in plain words, then the freer prompts of promised.yaml."""
    plain = [
        Promise(f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}", colour, shape)
        for colour in COLOURS
        for shape in SHAPES
    ]
    free = yaml.safe_load(Path(__file__).with_name("promised.yaml").read_text("utf-8"))
    return (*plain, *(Promise(**one) for one in free))

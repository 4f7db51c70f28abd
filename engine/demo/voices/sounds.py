"""The sounds that the demo voices learn: a wave for every voice and letter, and what a whole text sounds like.

A pitch that is a multiple of the frame rate has the same phase in every frame. So one frame of a letter is all there
is to know of it, a frame can be learned sample by sample, and letters fade into each other without beating.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.demo.voices.cast import Part

SAMPLE_RATE = 16000
FRAME_SAMPLES = 320
FRAME_RATE = SAMPLE_RATE // FRAME_SAMPLES
PEAK = 0.5
HIGHEST_HZ = 4000
FORMANT_WIDTHS_HZ = (90, 130, 220)
FORMANT_GAINS = (1.0, 0.8, 0.45)
SPACE = " "
LETTERS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("sounds.yaml").read_text("utf-8"))


def frame_of(part: Part, letter: str) -> NDArray[np.float32]:
    """One frame of a steady letter, (FRAME_SAMPLES,); its highest sample is PEAK times the letter's loudness."""
    if letter == SPACE:
        return np.zeros(FRAME_SAMPLES, dtype=np.float32)
    harmonics = np.arange(1, HIGHEST_HZ // part.pitch_hz + 1)
    hertz = harmonics * part.pitch_hz
    # A little of the lowest harmonics in every letter: without them the ear, and a measurement, miss the pitch.
    strength = 0.35 / harmonics
    for formant, width, gain in zip(LETTERS[letter]["formants"], FORMANT_WIDTHS_HZ, FORMANT_GAINS, strict=True):
        strength = strength + gain / (1 + ((hertz - formant * part.tract) / width) ** 2)
    strength = strength * (1 + hertz / 1000) ** (part.bright - 1.7)
    # Schroeder's phases spread the energy over the period: low peaks, no buzz.
    phases = np.pi * harmonics * (harmonics - 1) / len(harmonics)
    seconds = np.arange(FRAME_SAMPLES) / SAMPLE_RATE
    wave: NDArray[np.float64] = (
        strength[:, None] * np.cos(2 * np.pi * hertz[:, None] * seconds + phases[:, None])
    ).sum(axis=0)
    loudest = PEAK * float(LETTERS[letter]["loud"])
    scaled: NDArray[np.float32] = (wave * (loudest / np.abs(wave).max())).astype(np.float32)
    return scaled


def fading(frames: torch.Tensor) -> torch.Tensor:
    """The sound of letters in steady frames, (batch, frames, FRAME_SAMPLES), as samples: (batch, all samples).

    From the middle of a frame to the middle of the next, one fades out while the other fades in.
    """
    across = (torch.arange(FRAME_SAMPLES) + 0.5) / FRAME_SAMPLES
    before, after = (0.5 - across).clamp(min=0), (across - 0.5).clamp(min=0)
    padded = torch.nn.functional.pad(frames, (0, 0, 1, 1))
    faded = padded[:, :-2] * before + frames * (1 - before - after) + padded[:, 2:] * after
    return faded.flatten(1)

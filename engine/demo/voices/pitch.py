"""Measures the pitch of a sound by autocorrelation, to examine the demo voices and to test them. Needs numpy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW_SECONDS = 0.05
LOWEST_HZ, HIGHEST_HZ = 70, 400
# Beside the loudest window: what is quieter is a pause or a fading.
SMALLEST_LOUDNESS = 0.2
# Of the best correlation: two periods later a sound is as much like itself as one period later, so the first counts.
NEARLY_BEST = 0.9


def pitches_hz(wave: NDArray[np.floating], sample_rate: int) -> NDArray[np.float64]:
    """The pitch of every window that is loud enough, in hertz; empty for silence. `wave` is (samples,)."""
    length = int(WINDOW_SECONDS * sample_rate)
    starts = range(0, len(wave) - 2 * length + 1, length // 2)
    loudness = np.array([np.sqrt(np.mean(np.square(wave[start : start + length]))) for start in starts])
    loud = loudness > SMALLEST_LOUDNESS * loudness.max(initial=0)
    found = (
        _pitch_hz(wave[start : start + 2 * length].astype(np.float64), sample_rate)
        for start, is_loud in zip(starts, loud, strict=True)
        if is_loud
    )
    return np.array([pitch for pitch in found if pitch is not None])


def median_pitch_hz(wave: NDArray[np.floating], sample_rate: int) -> float:
    """The pitch in the middle of all that are measured. Raises ValueError where there is none to measure."""
    found = pitches_hz(wave, sample_rate)
    if not found.size:
        raise ValueError("This sound has no pitch: it is silent, noise, or shorter than a tenth of a second.")
    return float(np.median(found))


def _pitch_hz(piece: NDArray[np.float64], sample_rate: int) -> float | None:
    half = len(piece) // 2
    first = piece[:half] - piece[:half].mean()
    lags = np.arange(int(sample_rate / HIGHEST_HZ) - 1, int(sample_rate / LOWEST_HZ) + 2)
    later = sliding_window_view(piece, half)[lags]
    later = later - later.mean(axis=1, keepdims=True)
    sizes = np.sqrt((first @ first) * np.square(later).sum(axis=1))
    alike = (later @ first) / np.where(sizes > 0, sizes, 1.0)
    inner = alike[1:-1]
    peaks = np.flatnonzero((inner >= alike[:-2]) & (inner > alike[2:]) & (inner > 0.3))
    if not peaks.size:
        return None
    best = peaks[inner[peaks] >= NEARLY_BEST * inner[peaks].max()][0]
    return float(sample_rate / lags[1 + best])

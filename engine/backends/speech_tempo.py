"""Makes speech faster or slower at the same pitch, for runtimes whose own control of speed is not exact.

WSOLA. Source: W. Verhelst and M. Roelands, "An overlap-add technique based on waveform similarity (WSOLA) for high
quality time-scale modification of speech", ICASSP 1993.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FRAME_SECONDS = 0.03  # more than one period of the lowest voices
_SEARCH_SECONDS = 0.008


def stretch(samples: NDArray[np.float32], rate: int, speed: float) -> NDArray[np.float32]:
    """Return `samples` (mono) in 1/`speed` of their length, to a sample."""
    length = round(len(samples) / speed)
    hop = round(rate * _FRAME_SECONDS / 2)
    search = round(rate * _SEARCH_SECONDS)
    if speed == 1 or len(samples) <= 2 * hop:
        return samples[:length] if speed > 1 else np.pad(samples, (0, length - len(samples)))
    window = np.hanning(2 * hop + 1)[:-1].astype(np.float32)  # half-overlapping copies of it add up to 1
    frames = -(-length // hop) + 1
    source = np.pad(samples, (hop + search, 3 * hop + search + round(hop * speed)))
    made = np.zeros((frames + 1) * hop, np.float32)
    wanted = source[search : search + 2 * hop]
    for frame in range(frames):
        near = min(round(frame * hop * speed), len(samples) + search)
        start = near + _likest(source[near : near + 2 * hop + 2 * search], wanted)
        made[frame * hop : frame * hop + 2 * hop] += window * source[start : start + 2 * hop]
        wanted = source[start + hop : start + 3 * hop]
    return made[hop : hop + length]


def _likest(region: NDArray[np.float32], wanted: NDArray[np.float32]) -> int:
    """Where in `region` the sound goes on most like `wanted`: a cut there is not heard."""
    likeness = np.correlate(region, wanted, "valid")
    energy = np.cumsum(np.concatenate(([0.0], region.astype(np.float64) ** 2)))
    loudness = energy[len(wanted) :] - energy[: -len(wanted)]
    return int(np.argmax(likeness / np.sqrt(loudness + 1e-9)))

"""After which steps an unfinished image is shown."""

from __future__ import annotations


def preview_steps(steps: int, previews: int) -> tuple[int, ...]:
    """Return after how many of `steps` each preview is made: evenly spread, never twice, never after the last.

    Fewer than `previews` where there are too few steps.
    """
    return tuple(sorted({number * steps // (previews + 1) for number in range(1, previews + 1)} - {0, steps}))

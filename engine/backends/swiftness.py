"""Whether work of one kind is quick enough to be done on the event loop: whoever does it asks first, and measures."""

from __future__ import annotations

import time

# A template may be slow at will: after one such conversation so many go to the thread.
_SLOW_SECONDS = 0.05
_AVOIDED = 1000


class Swiftness:
    """Whether work of one kind has been quick enough to be done on the event loop."""

    def __init__(self) -> None:
        self._avoided = 0

    def likely(self) -> bool:
        """Ask before each piece of work; after a slow one the answer is no for a while."""
        if not self._avoided:
            return True
        self._avoided -= 1
        return False

    def __enter__(self) -> None:
        """Begin to measure."""
        self._began = time.thread_time()  # not the clock: on a busy machine whatever is swift may be held up

    def __exit__(self, *_: object) -> None:
        """Note how long it took the processor."""
        if time.thread_time() - self._began > _SLOW_SECONDS:
            self._avoided = _AVOIDED

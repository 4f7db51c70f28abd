"""An event loop whose clock stands still, and jumps to the next timer when there is nothing to do. Holds no tests.

Pauses cost no time, and a busy machine changes nothing: the same steps give the same times. `settle` is for any loop.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _NeverWaits(selectors.DefaultSelector):
    skipped_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen here"
        ready = super().select(0)
        if not ready:
            self.skipped_seconds += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """For code without threads and processes."""

    def __init__(self) -> None:
        self._waits = _NeverWaits()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.skipped_seconds


def on_skipping_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an async test one that runs on a `SkippingLoop` of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(test(*arguments, **named))

    return run


async def settle() -> None:
    """Let everything run that can without a timer, a thread or another process."""
    for _ in range(20):
        await asyncio.sleep(0)

"""Keeps a stream from running ahead of its client: a front holds so many steps of a call at most, as one process would.

What the engine makes meanwhile becomes one step (engine/backends/plain_steps.py), and the call counts as running.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.front.messages import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine import ChatStep
    from server.front.messages import ToFront

# A front says so each time that it has passed on so many: the half of what it may hold.
TOLD_EVERY_STEPS = 128
_MOST_STEPS = 2 * TOLD_EVERY_STEPS


class StepWindow:
    """Of one call, in the lead. `say` sends its front a message."""

    def __init__(self, call: int, say: Callable[[ToFront], None]) -> None:
        self._call = call
        self._say = say
        self._ahead = 0
        self._passed_on = asyncio.Event()

    def say(self, step: ChatStep) -> None:
        """Send a step, and count it."""
        self._ahead += 1
        self._say(Step(self._call, step))

    def offer(self, step: ChatStep) -> bool:
        """Send a step if there is room. See `ChatRequest.on_step`."""
        if self._ahead >= _MOST_STEPS:
            return False
        self.say(step)
        return True

    def passed_on(self, steps: int) -> None:
        """The client has got so many."""
        self._ahead -= steps
        self._passed_on.set()

    async def room(self) -> None:
        """Wait until the next step may be sent."""
        while self._ahead >= _MOST_STEPS:
            self._passed_on.clear()
            await self._passed_on.wait()

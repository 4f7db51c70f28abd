"""Background work that outlives the request that started it, and that a shutdown lets end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class SideTasks:
    """Tasks of one owner, on one event loop. asyncio itself keeps no reference to a task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin `work`. Its result, or its error, is the task's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` again and again, with a pause before each time, until `cancel`."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                await work()

        self.start(repeat())

    async def cancel(self) -> None:
        """End all that was begun, and wait for it."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait until all that was begun has ended."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: asyncio does not complain about it

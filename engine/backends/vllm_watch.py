"""Watches over the processes of one vLLM engine: sees at once that one has died, and after a while that they hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING

from engine.process.watchdog import Guard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.process import BaseProcess

    from engine.process.watchdog import Patience

_log = logging.getLogger("hearth.vllm")


class EngineWatch:
    """For one engine, from before its start to its end. Belongs to the event loop, but for `started`."""

    def __init__(self, model: str, patience: Patience | None) -> None:
        self._model = model
        self._processes: list[BaseProcess] = []
        self._sentinels: list[int] = []
        self._on_gone: Callable[[], None] | None = None
        self._ended = False
        self._guard = Guard(patience, self.pids, self._on_hang)
        self._guard.begin()

    def started(self, process: BaseProcess) -> None:
        """Take on a process that is loading. From any thread."""
        self._processes.append(process)

    def expect(self, ping: Callable[[], Awaitable[object]]) -> None:
        """It has started: from now on it has to answer between two steps, also when it has nothing to do."""
        self._guard.expect(ping)

    def call_when_gone(self, on_gone: Callable[[], None]) -> None:
        """Call this once: the moment the kernel says that a process is gone, or one hangs and was killed for it."""
        self._on_gone = on_gone
        loop = asyncio.get_running_loop()
        for process in self._processes:
            sentinel = os.dup(process.sentinel)  # vLLM closes its own while we still watch
            self._sentinels.append(sentinel)
            loop.add_reader(sentinel, self._gone)

    def kill_without(self, reader: asyncio.Task[None]) -> None:
        """Kill the processes should `reader` end first: nobody would ever hear of them again, nor that they are gone.

        vLLM catches and logs whatever its own half raises, and refuses every request from then on.
        """
        reader.add_done_callback(lambda _: None if self._ended else self.kill())

    def end(self) -> None:
        """Watch no more. Safe to call twice."""
        self._ended = True
        self._guard.end()
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels.clear()

    def kill(self) -> None:
        """End the processes now."""
        self._guard.end()
        for process in self._processes:
            with contextlib.suppress(ValueError):  # already closed
                process.kill()

    def pids(self) -> list[int]:
        """Return the processes there are of it, without their children."""
        found = []
        for process in list(self._processes):
            with contextlib.suppress(ValueError):  # it has ended, and is closed
                found.append(process.pid)
        return [pid for pid in found if pid is not None]

    def _on_hang(self, how: str) -> None:
        _log.error("%s: its engine process hangs and is killed: %s.", self._model, how)
        self.kill()
        if self._on_gone is not None:
            self._gone()  # not left to the kernel: a process whose driver hangs does not even die of a kill

    def _gone(self) -> None:
        self.end()
        if self._on_gone is not None:
            self._on_gone()

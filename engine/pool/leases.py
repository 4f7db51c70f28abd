"""Leases of models: a model with a lease is not evicted, and a request for one that is not loaded waits here.

What is loaded and evicted is decided in eviction.py and noted in the ledger (memory.py); the pool carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from engine.errors import ModelLoadingError, OverloadedError
from engine.pool.eviction import Model, decide, fill
from engine.pool.memory import Device, Ledger

# Longer than a busy model may keep another one waiting, and a large one takes to load.
_LONGEST_WAIT_SECONDS = 600.0
_MOST_WAITING = 512  # requests for one model; the queue of a loaded model has the same length by default


@dataclass(slots=True)
class _Use:
    """What requests do with one model."""

    leases: int = 0
    waiting: int = 0
    asked_at: float | None = None  # the oldest request that waits for it
    loaded_at: float = 0.0
    used_at: float = 0.0


class Lease:
    """A model that stays loaded for one request, until `release`. As a block (`with`) it is released at the end."""

    __slots__ = ("_leases", "_model")

    def __init__(self, leases: Leases, model: str) -> None:
        self._leases: Leases | None = leases
        self._model = model

    def release(self) -> None:
        """The request has ended. A second time does nothing."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.release(self._model)

    def __enter__(self) -> Self:
        """Release it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `release`."""
        self.release()


class Leases:
    """The leases of all models, and the memory that they have to share. One per pool; belongs to the event loop."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)  # kept for ever: tasks and requests refer to them
        self._swapped_at: dict[Device, float] = {}
        self.swaps = 0
        for name in fill(self._models(), ledger.evictable_budgets()):
            ledger.grant(name)

    async def acquire(self, name: str, usable: Callable[[], bool]) -> Lease:
        """Lease a model. One that comes and goes is waited for until it is loaded.

        `usable` says whether it is loaded, and raises `EngineError` when waiting is in vain. Raises
        `ModelLoadingError` after ten minutes and `OverloadedError` when too many wait.
        """
        if self._ledger.is_evictable(name) and not (self._stays(name) and usable()):
            await self._wait(name, usable)
        self._uses[name].leases += 1
        return Lease(self, name)

    def release(self, name: str) -> None:
        """A request has ended that had a lease."""
        use = self._uses[name]
        use.leases -= 1
        use.used_at = self._clock()
        if not use.leases and self._ledger.is_evictable(name):
            self._ledger.changes.notify()

    def waiting(self, name: str) -> int:
        """Return how many requests wait until it is loaded."""
        return self._uses[name].waiting

    def has_memory(self, name: str) -> bool:
        """Whether it may load, or stay loaded, now."""
        return not self._ledger.is_evictable(name) or self._ledger.state(name) in {"coming", "in"}

    async def until_granted(self, name: str) -> None:
        """Return when there is memory for it, which is then its own until it is released in the ledger.

        At once for one that always stays, but for memory that others have who are about to leave.
        """
        await self._ledger.changes.until(lambda: self.has_memory(name))
        if self._ledger.state(name) == "out":
            self._ledger.grant(name)
        await self._ledger.reserve(name)

    async def until_evicted(self, name: str) -> None:
        """Return when it is evicted and its last lease released; new requests wait meanwhile, until it is back."""
        await self._ledger.changes.until(lambda: not (self._stays(name) or self._uses[name].leases))

    def loaded(self, name: str) -> None:
        """It answers now."""
        use = self._uses[name]
        use.asked_at = None
        use.loaded_at = use.used_at = self._clock()
        self._ledger.loaded(name)

    async def run(self) -> None:
        """Decide, whenever something has changed, until cancelled."""
        while True:
            now = self._clock()
            decision = decide(self._models(), self._ledger.evictable_budgets(), self._swapped_at, now)
            self.swaps += len(decision.swaps)
            for name in decision.swaps:
                self._swapped_at.update(dict.fromkeys(self._ledger.most(name), now))
            for name in decision.load:
                self._ledger.grant(name)
            for name in decision.evict:
                self._ledger.evict(name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(decision.again_seconds):
                    await self._ledger.changes.wait()

    def _models(self) -> list[Model]:
        return [
            Model(
                name=name,
                bytes_on=self._ledger.most(name),
                state=self._ledger.state(name),
                leases=(use := self._uses[name]).leases,
                asked_at=use.asked_at,
                loaded_at=use.loaded_at,
                used_at=use.used_at,
                pinned=share.pinned,
                unload_after_seconds=share.unload_after_seconds,
            )
            for name, share in self._ledger.evictable.items()
        ]

    async def _wait(self, name: str, usable: Callable[[], bool]) -> None:
        use = self._uses[name]
        if use.waiting >= _MOST_WAITING:
            raise OverloadedError(
                "This model shares memory with others, and too many requests wait for it. Try again later.",
                retry_after_seconds=30,
            )
        use.waiting += 1
        try:
            async with asyncio.timeout(_LONGEST_WAIT_SECONDS):
                while not (usable() and self._stays(name)):
                    if use.asked_at is None:
                        use.asked_at = self._clock()
                        self._ledger.changes.notify()
                    await self._ledger.changes.wait()
        except TimeoutError:
            raise ModelLoadingError(
                "This model shares memory with others, and has not been loaded for ten minutes. Try again later.",
                retry_after_seconds=60,
            ) from None
        finally:
            use.waiting -= 1
            if not use.waiting:
                use.asked_at = None

    def _stays(self, name: str) -> bool:
        return self._ledger.state(name) != "leaving"

"""Leases of models, and what is loaded and evicted where not all fit into memory together.

A model with a lease is not evicted, and a request for one that is not loaded waits here. `decide` is pure: it knows
neither processes nor requests, has no clock, and must not log. What it decides is noted in the ledger (memory.py), and
the pool carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.errors import ModelLoadingError, OverloadedError
from engine.pool.memory import Bytes, Device, Ledger, State

# One swap on a device in this time: two users who want different models must not make it do nothing but load.
SWAP_EVERY_SECONDS = 10.0
# A model that is always in use is evicted after a request for another one has waited this long.
LONGEST_WAIT_SECONDS = 30.0
# Longer than a busy model may keep another one waiting, and a large one takes to load.
_LONGEST_LOAD_SECONDS = 600.0
_MOST_WAITING = 512  # requests for one model; the queue of a loaded model has the same length by default


@dataclass(frozen=True, slots=True)
class Model:
    """A model that comes and goes, as it is now. `asked_at`: since when a request waits for it. Times in seconds."""

    name: str
    bytes_on: Bytes
    state: State = "out"
    leases: int = 0
    asked_at: float | None = None
    loaded_at: float = 0.0
    used_at: float = 0.0
    pinned: bool = False
    unload_after_seconds: float | None = None

    def on(self, device: Device) -> int:
        return self.bytes_on.get(device, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and after how many seconds to ask again though nothing has happened.

    `swaps` are the models for which others are evicted.
    """

    load: tuple[str, ...] = ()
    evict: tuple[str, ...] = ()
    swaps: tuple[str, ...] = ()
    again_seconds: float | None = None


def fill(models: Iterable[Model], budgets: Bytes) -> tuple[str, ...]:
    """Return what to load at the start: as many as fit, in the order given, pinned ones first."""
    draft = _Draft(models, budgets)
    pinned_first = sorted(draft.models, key=lambda model: not model.pinned)
    return tuple(model.name for model in pinned_first if draft.admit(model))


def decide(models: Iterable[Model], budgets: Bytes, swapped_at: Mapping[Device, float], now: float) -> Decision:
    """Return what to load and to evict.

    The models that come, are in and leave never take more than a budget. What waits longest is loaded first; what was
    used longest ago is evicted first, and what is in use only after LONGEST_WAIT_SECONDS.
    """
    draft = _Draft(models, budgets)
    draft.evict(model for model in draft.evictable() if _idle_in(model, now) == 0)
    for model in draft.evictable():  # models.yaml has given its memory to others
        if any(draft.free(device, soon=True) < 0 for device in model.bytes_on):
            draft.evict([model])
    again = [seconds for model in draft.evictable() if (seconds := _idle_in(model, now)) is not None]
    load, swaps = [], []
    kept: set[Device] = set()  # what is freed there is for what waits longest
    for model in draft.waiting():
        if kept.isdisjoint(model.bytes_on):
            if draft.admit(model):
                load.append(model.name)
            else:
                victims, wait = _victims(draft, model, swapped_at, now)
                draft.evict(victims)
                swaps += [model.name] if victims else []
                again += [] if wait is None else [wait]
        kept.update(model.bytes_on)
    return Decision(tuple(load), tuple(draft.evicted), tuple(swaps), min(again, default=None))


class _Draft:
    """The models as they will be when what has been decided so far is carried out."""

    def __init__(self, models: Iterable[Model], budgets: Bytes) -> None:
        self.models = list(models)
        self._states = {model.name: model.state for model in self.models}
        self._budgets = budgets
        self.evicted: list[str] = []

    def free(self, device: Device, *, soon: bool = False) -> int:
        """Return what nothing takes of a device; `soon`: when all that leaves has left."""
        absent = {"out", "leaving"} if soon else {"out"}
        taken = sum(model.on(device) for model in self.models if self._states[model.name] not in absent)
        return self._budgets.get(device, 0) - taken

    def waiting(self) -> list[Model]:
        """What is asked for, the oldest request first."""
        asked = [(model.asked_at, model.name, model) for model in self.models if model.asked_at is not None]
        return [model for _, name, model in sorted(asked, key=lambda one: one[:2]) if self._states[name] == "out"]

    def evictable(self) -> list[Model]:
        """What may be evicted, in that order."""
        found = [model for model in self.models if self._states[model.name] == "in" and not model.pinned]
        return sorted(found, key=lambda model: (model.leases > 0, model.used_at))

    def admit(self, model: Model) -> bool:
        fits = all(self.free(device) >= size for device, size in model.bytes_on.items())
        if fits:
            self._states[model.name] = "coming"
        return fits

    def evict(self, models: Iterable[Model]) -> None:
        for model in models:
            self._states[model.name] = "leaving"
            self.evicted.append(model.name)


def _victims(
    draft: _Draft, model: Model, swapped_at: Mapping[Device, float], now: float
) -> tuple[list[Model], float | None]:
    """Return what to evict for a model; nothing when that must wait, and for how many seconds."""
    sizes = model.bytes_on.items()
    lacks = {device: lack for device, size in sizes if (lack := size - draft.free(device, soon=True)) > 0}
    if not lacks:
        return [], None  # enough is leaving
    pause = max(swapped_at.get(device, -SWAP_EVERY_SECONDS) for device in lacks) + SWAP_EVERY_SECONDS - now
    if pause > 0:
        return [], pause
    ripe_in = [(one, _ripe_in(one, model, now)) for one in draft.evictable()]
    chosen = _fewest([one for one, seconds in ripe_in if seconds <= 0], lacks)
    return chosen, None if chosen else min((seconds for _, seconds in ripe_in if seconds > 0), default=None)


def _ripe_in(one: Model, asked: Model, now: float) -> float:
    """Return after how many seconds it may be evicted for the model asked for; 0 or less: now."""
    settled = one.loaded_at + SWAP_EVERY_SECONDS - now
    if one.leases == 0:
        return settled
    asked_at = now if asked.asked_at is None else asked.asked_at
    return max(settled, asked_at + LONGEST_WAIT_SECONDS - now)


def _idle_in(model: Model, now: float) -> float | None:
    """Return after how many seconds one that may be evicted has been idle for too long; None: not by time alone."""
    if model.unload_after_seconds is None or model.leases:
        return None
    return max(0.0, model.used_at + model.unload_after_seconds - now)


def _fewest(ordered: Iterable[Model], lacks: Mapping[Device, int]) -> list[Model]:
    """Return the first of them that free enough, less those that need not go; none if it cannot be."""
    chosen: list[Model] = []
    for model in ordered:
        if _is_enough(chosen, lacks):
            break
        if any(model.on(device) for device in lacks):
            chosen.append(model)
    if not _is_enough(chosen, lacks):
        return []
    for model in list(chosen):
        others = [one for one in chosen if one is not model]
        if _is_enough(others, lacks):
            chosen = others
    return chosen


def _is_enough(chosen: list[Model], lacks: Mapping[Device, int]) -> bool:
    return all(sum(model.on(device) for model in chosen) >= lack for device, lack in lacks.items())


@dataclass(slots=True)
class _Use:
    """What requests do with one model."""

    leases: int = 0
    waiting: int = 0
    asked_at: float | None = None  # the oldest request that waits for it
    loaded_at: float = 0.0
    used_at: float = 0.0


class Leases:
    """The leases of all models, and the memory that they have to share. One per pool; belongs to the event loop."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)  # kept for ever: tasks and requests refer to them
        self._swapped_at: dict[Device, float] = {}
        self.swaps = 0
        for name in fill(self._models(), ledger.evictable_budgets()):
            ledger.move(name, "coming")

    async def acquire(self, name: str, usable: Callable[[], bool]) -> contextlib.ExitStack:
        """Lease a model until what is returned is closed. One that comes and goes is waited for until it is loaded.

        `usable` says whether it is loaded, and raises `EngineError` when waiting is in vain. Raises
        `ModelLoadingError` after ten minutes and `OverloadedError` when too many wait.
        """
        if self._ledger.is_evictable(name) and not (self._stays(name) and usable()):
            await self._wait(name, usable)
        self._uses[name].leases += 1
        lease = contextlib.ExitStack()
        lease.callback(self._release, name)
        return lease

    def _release(self, name: str) -> None:
        use = self._uses[name]
        use.leases -= 1
        use.used_at = self._clock()
        if not use.leases and self._ledger.is_evictable(name):
            self._ledger.changes.notify()

    def waiting(self, name: str) -> int:
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
            self._ledger.move(name, "coming")
        await self._ledger.reserve(name)

    async def until_evicted(self, name: str) -> None:
        """Return when it is evicted and its last lease released; new requests wait meanwhile, until it is back."""
        await self._ledger.changes.until(lambda: not (self._stays(name) or self._uses[name].leases))

    def loaded(self, name: str) -> None:
        use = self._uses[name]
        use.asked_at = None
        use.loaded_at = use.used_at = self._clock()
        self._ledger.move(name, "in")

    async def run(self) -> None:
        """Decide, whenever something has changed, until cancelled."""
        while True:
            now = self._clock()
            decision = decide(self._models(), self._ledger.evictable_budgets(), self._swapped_at, now)
            self.swaps += len(decision.swaps)
            for name in decision.swaps:
                self._swapped_at.update(dict.fromkeys(self._ledger.most(name), now))
            for name in decision.load:
                self._ledger.move(name, "coming")
            for name in decision.evict:
                self._ledger.move(name, "leaving")
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
            async with asyncio.timeout(_LONGEST_LOAD_SECONDS):
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

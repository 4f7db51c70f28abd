"""The memory ledger: what is planned for each model, what each really has, which are evictable, and their leases.

A changed plan takes effect at a model's next load; until then the ledger has both. placement/ makes the plan; `decide`
says which models to load and evict if not all fit at once. A model with a lease is not evicted, and a request for one
that is not loaded waits here.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ModelLoadingError, OverloadedError

Device = int | None  # a GPU's index; None: RAM
Bytes = Mapping[Device, int]
State = Literal["out", "coming", "in", "leaving"]

# The least time between two swaps on a device, and after a load: else two users could have it load all the time.
SWAP_EVERY_SECONDS = 10.0
# A model that is always in use is evicted after a request for another one has waited this long.
LONGEST_WAIT_SECONDS = 30.0
# Longer than a busy model may keep another one waiting, and a large one takes to load.
_LONGEST_LOAD_SECONDS = 600.0
_MOST_WAITING = 512  # requests for one model; the queue of a loaded model has the same length by default
# A difference below this, and below a sixteenth, is not worth a message.
_WORTH_SAYING_BYTES = 64 << 20


@dataclass(slots=True)
class Model:
    """An evictable model, as it is now. A request has waited for it since `asked_at`. Times in seconds."""

    name: str
    bytes_on: Bytes = field(default_factory=dict)
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
class Share:
    """What is planned for one model.

    With `swaps` it shares its bytes with others that swap, and is loaded when requested. A `pinned` one is never
    evicted. After `unload_after_seconds` without a request it is evicted even if nothing needs its memory (None: not).
    """

    bytes_on: Bytes
    swaps: bool = False
    pinned: bool = False
    unload_after_seconds: float | None = None

    @property
    def evictable(self) -> bool:
        return bool(self.bytes_on) and (self.swaps or self.unload_after_seconds is not None)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What all models together may take of each device, and each one's share. No budget: no limit."""

    budgets: Bytes = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry(Model):
    """One model. Times are the event loop's."""

    has: Bytes | None = None  # None: nothing
    again: Bytes | None = None  # what it takes when it restarts or wakes
    asleep: bool = False
    ending: bool = False  # it ends with its last answer, by a reload
    waiting: int = 0  # requests


class Changes:
    """Wakes all that wait for a condition, to check it again. Belongs to one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; it is checked now and after each change."""
        while not condition():
            await self.wait()


class Ledger:
    """One per engine; all methods belong to its event loop. Each change of an entry notifies `changes`."""

    def __init__(self, plan: MemoryPlan | None = None) -> None:
        self._plan = plan or MemoryPlan()
        self._entries: dict[str, _Entry] = {}  # never removed: tasks and requests refer to them
        self._swapped_at: dict[Device, float] = {}
        self.swaps = 0
        self.changes = Changes()

    def plan(self, plan: MemoryPlan) -> None:
        self._plan = plan
        for name, entry in self._entries.items():
            if entry.state == "leaving" and not self.is_evictable(name):
                entry.state = "in"  # it has all the memory that it needs
        self.changes.notify()

    def is_evictable(self, name: str) -> bool:
        """Whether `decide` may evict a model; all others stay loaded."""
        return self._share(name).evictable

    def evictable_budgets(self) -> dict[Device, int]:
        """Return what evictable models may take together: what others leave, but at least the size of the largest."""
        budgets = dict(self._plan.budgets)
        for name, share in sorted(self._plan.shares.items(), key=lambda one: one[1].evictable):
            for device, size in self._most(name).items():
                left = budgets.get(device, 0)
                budgets[device] = max(left, size) if share.evictable else left - size
        return budgets

    def fill(self) -> None:
        """Grant memory to as many as fit, to be loaded at the start."""
        for name in fill(self._models(), self.evictable_budgets()):
            self._move(name, "coming")

    async def run(self) -> None:
        """Decide, whenever something has changed, until cancelled."""
        while True:
            now = _now()
            decision = decide(self._models(), self.evictable_budgets(), self._swapped_at, now)
            self.swaps += len(decision.swaps)
            for name in decision.swaps:
                self._swapped_at.update(dict.fromkeys(self._most(name), now))
            for name in decision.load:
                self._move(name, "coming")
            for name in decision.evict:
                self._move(name, "leaving")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(decision.again_seconds):
                    await self.changes.wait()

    def evict(self, name: str) -> bool:
        """Evict a model when its last lease ends; False if it is never evicted. The next request loads it again."""
        if self.is_evictable(name) and self._entry(name).state == "in":
            self._move(name, "leaving")
        return self.is_evictable(name)

    async def acquire(self, name: str, usable: Callable[[], bool]) -> contextlib.ExitStack:
        """Lease a model until what is returned is closed. Waits until an evictable model is loaded.

        `usable` says whether it is loaded, and raises `EngineError` if waiting is useless. Raises
        `ModelLoadingError` after ten minutes and `OverloadedError` if too many wait.
        """
        entry = self._entry(name)
        if self.is_evictable(name) and not (entry.state != "leaving" and usable()):
            await self._wait(entry, usable)
        entry.leases += 1
        lease = contextlib.ExitStack()
        lease.callback(self._end_lease, name)
        return lease

    def waiting(self, name: str) -> int:
        return self._entry(name).waiting

    def leases(self, name: str) -> int:
        return self._entry(name).leases

    def has_memory(self, name: str) -> bool:
        """Whether a model may load, or stay loaded, now."""
        return not self.is_evictable(name) or self._entry(name).state in {"coming", "in"}

    async def until_granted(self, name: str) -> None:
        """Return when a model has memory for a load, which is its own until `release`.

        A model that is never evicted waits only for memory of others that are leaving.
        """
        await self.changes.until(lambda: self.has_memory(name))
        if self._entry(name).state == "out":
            self._move(name, "coming")
        await self.reserve(name)

    async def until_evicted(self, name: str) -> None:
        """Return when a model is evicted and its last lease released; new requests wait until it is back."""
        entry = self._entry(name)
        await self.changes.until(lambda: entry.state == "leaving" and not entry.leases)

    def loaded(self, name: str) -> None:
        entry = self._entry(name)
        entry.asked_at = None
        entry.loaded_at = entry.used_at = _now()
        self._move(name, "in")

    def release(self, name: str, *, asleep: bool = False) -> None:
        """Record that a model has no memory any more; one that is `asleep` wakes with what it had."""
        entry = self._entry(name)
        entry.has, entry.ending, entry.asleep = None, False, asleep
        if not asleep:
            entry.again = None
        self._move(name, "out")

    def take(self, name: str, took: Bytes) -> None:
        """Record that a model is being loaded with these bytes."""
        entry = self._entry(name)
        entry.has = entry.again = took
        entry.asleep = False

    def forget(self, names: Iterable[str]) -> None:
        """Have the next load of these take what is planned, never what they had."""
        for name in names:
            self._entry(name).again = None

    def end_soon(self, names: Iterable[str]) -> None:
        """Record that these end with their last answer, to be loaded again or not at all."""
        for name in names:
            entry = self._entry(name)
            entry.ending = entry.ending or entry.has is not None
        self.changes.notify()

    async def reserve(self, name: str) -> None:
        """Wait until leaving models have freed enough for a model's next load; then that memory is its own."""
        await self.changes.until(lambda: not self._must_wait(name))
        self._entry(name).has = self._next_load(name)

    def takes_what_is_planned(self, name: str) -> bool:
        """Whether a model's next load takes what is planned. False: what it had, because others still have theirs."""
        entry = self._entry(name)
        if entry.again is None or entry.asleep:
            return entry.again is None
        budgets = self._plan.budgets.items()
        return all(self._planned_on(device, renewed={name}) <= budget for device, budget in budgets)

    def later(self) -> dict[str, Bytes]:
        """Return what is planned for each loaded model that has another amount."""
        return {name: share.bytes_on for name, share in self._plan.shares.items() if self._differs(name)}

    def too_much(self) -> set[str]:
        """Return the models that have to be loaded again, because they have what others need for their plan."""
        planned = self._plan.shares
        there = {
            name for name, entry in self._entries.items() if entry.has is not None or entry.asleep
        } & planned.keys()
        found: set[str] = set()
        for device, budget in self._plan.budgets.items():
            while self._planned_on(device, renewed=found) > budget:
                had = {name: self._entry(name).again or {} for name in sorted(there - found)}
                more = {name: had[name].get(device, 0) - planned[name].bytes_on.get(device, 0) for name in had}
                name = max(more, key=more.__getitem__, default=None)
                if name is None or more[name] <= 0:
                    break
                found.add(name)
        return found

    def _share(self, name: str) -> Share:
        return self._plan.shares.get(name) or Share({})

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            self._entries[name] = _Entry(name)
        return self._entries[name]

    def _models(self) -> list[Model]:
        shares = {name: share for name, share in self._plan.shares.items() if share.evictable}
        for name, share in shares.items():
            entry = self._entry(name)
            entry.bytes_on, entry.pinned = self._most(name), share.pinned
            entry.unload_after_seconds = share.unload_after_seconds
        return [self._entry(name) for name in shares]

    def _move(self, name: str, state: State) -> None:
        """Coming: the model may be loaded or woken; its memory is its own until `release`. Leaving: once leases end."""
        self._entry(name).state = state
        self.changes.notify()

    async def _wait(self, entry: _Entry, usable: Callable[[], bool]) -> None:
        if entry.waiting >= _MOST_WAITING:
            raise OverloadedError(
                "This model shares memory with others, and too many requests wait for it. Try again later.",
                retry_after_seconds=30,
                limit="models_that_take_turns",
            )
        entry.waiting += 1
        try:
            async with asyncio.timeout(_LONGEST_LOAD_SECONDS):
                while not (usable() and entry.state != "leaving"):
                    if entry.asked_at is None:
                        entry.asked_at = _now()
                        self.changes.notify()
                    await self.changes.wait()
        except TimeoutError:
            raise ModelLoadingError(
                "This model shares memory with others, and has not been loaded for ten minutes. Try again later.",
                retry_after_seconds=60,
            ) from None
        finally:
            entry.waiting -= 1
            if not entry.waiting:
                entry.asked_at = None

    def _end_lease(self, name: str) -> None:
        entry = self._entry(name)
        entry.leases -= 1
        entry.used_at = _now()
        if not entry.leases and self.is_evictable(name):
            self.changes.notify()

    def _most(self, name: str) -> Bytes:
        """Return the most that a model may take on each device until the next reload: what it had, or its plan."""
        again, need = self._entry(name).again or {}, self._share(name).bytes_on
        return {device: max(again.get(device, 0), need.get(device, 0)) for device in {**again, **need}}

    def _next_load(self, name: str) -> Bytes:
        again = None if self.takes_what_is_planned(name) else self._entry(name).again
        return self._share(name).bytes_on if again is None else again

    def _must_wait(self, name: str) -> bool:
        """Whether others that have memory that it needs are going to leave. If none is, waiting is useless."""
        new = self._next_load(name)
        others = {other: entry.has for other, entry in self._entries.items() if other != name and entry.has}
        # By a reload, or by an eviction, which frees the other's share
        stays = not self._share(name).swaps
        leaving = [other for other in others if self._entry(other).ending or (stays and self._share(other).swaps)]
        for device, budget in self._plan.budgets.items():
            sizes = {other: has.get(device, 0) for other, has in others.items()}
            lacks = bool(new.get(device)) and sum(sizes.values()) + new.get(device, 0) > budget
            if lacks and any(sizes[other] for other in leaving):
                return True
        return False

    def _planned_on(self, device: Device, renewed: Collection[str]) -> int:
        """Return what all planned models take together, if `renewed` follow the plan and others keep what they have."""
        stay, largest_swap = 0, 0
        for name, share in self._plan.shares.items():
            again = self._entry(name).again
            size = (share.bytes_on if name in renewed or again is None else again).get(device, 0)
            if share.swaps:
                largest_swap = max(largest_swap, size)
            else:
                stay += size
        return stay + largest_swap

    def _differs(self, name: str) -> bool:
        entry, need = self._entry(name), self._share(name).bytes_on
        has = need if entry.has is None or entry.ending else entry.has
        return any(
            abs(has.get(device, 0) - need.get(device, 0)) > max(_WORTH_SAYING_BYTES, need.get(device, 0) // 16)
            for device in {**has, **need}
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and when to call `decide` again at the latest.

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
    """Return what to load and to evict. Pure: without processes, requests, a clock or a log; the pool carries it out.

    Models that are coming, in or leaving never take more than a budget. The model with the oldest waiting request is
    loaded first; the least recently used is evicted first, and one in use only after LONGEST_WAIT_SECONDS.
    """
    draft = _Draft(models, budgets)
    draft.evict(model for model in draft.evictable() if _idle_in(model, now) == 0)
    for model in draft.evictable():  # after a reload with a smaller budget
        if any(draft.free(device, soon=True) < 0 for device in model.bytes_on):
            draft.evict([model])
    again = [seconds for model in draft.evictable() if (seconds := _idle_in(model, now)) is not None]
    load, swaps = [], []
    kept: set[Device] = set()  # what is freed there is for the oldest request
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
    """The models as they will be after the decisions so far."""

    def __init__(self, models: Iterable[Model], budgets: Bytes) -> None:
        self.models = list(models)
        self._states = {model.name: model.state for model in self.models}
        self._budgets = budgets
        self.evicted: list[str] = []

    def free(self, device: Device, *, soon: bool = False) -> int:
        """Return the free bytes of a device; `soon`: after all that are leaving have left."""
        absent = {"out", "leaving"} if soon else {"out"}
        taken = sum(model.on(device) for model in self.models if self._states[model.name] not in absent)
        return self._budgets.get(device, 0) - taken

    def waiting(self) -> list[Model]:
        """Requested models, the oldest request first."""
        asked = [(model.asked_at, model.name, model) for model in self.models if model.asked_at is not None]
        return [model for _, name, model in sorted(asked, key=lambda one: one[:2]) if self._states[name] == "out"]

    def evictable(self) -> list[Model]:
        """Models that may be evicted, in that order."""
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
    """Return what to evict for a model; or nothing, and for how many seconds that must wait."""
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
    """Return after how many seconds `one` may be evicted for the requested model; 0 or less: now."""
    settled = one.loaded_at + SWAP_EVERY_SECONDS - now
    if one.leases == 0:
        return settled
    asked_at = now if asked.asked_at is None else asked.asked_at
    return max(settled, asked_at + LONGEST_WAIT_SECONDS - now)


def _idle_in(model: Model, now: float) -> float | None:
    """Return the seconds until `unload_after_seconds` is over; None: no such limit, or in use."""
    if model.unload_after_seconds is None or model.leases:
        return None
    return max(0.0, model.used_at + model.unload_after_seconds - now)


def _fewest(ordered: Iterable[Model], lacks: Mapping[Device, int]) -> list[Model]:
    """Return models from the front of `ordered` that free enough, none superfluous; [] if all free too little."""
    chosen = list(ordered)
    for model in reversed(chosen):
        others = [one for one in chosen if one is not model]
        if _is_enough(others, lacks):
            chosen = others
    return chosen if _is_enough(chosen, lacks) else []


def _is_enough(chosen: list[Model], lacks: Mapping[Device, int]) -> bool:
    return all(sum(model.on(device) for model in chosen) >= lack for device, lack in lacks.items())

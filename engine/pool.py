"""Keeps every configured model loaded: states, restarts with back-off, and who may use a model right now.

How a model is loaded is left to the `load` function it is given (engine/engine.py); requests are not seen here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.errors import LoadError, ModelLoadingError, UnavailableError, UnknownModelError, engine_died
from engine.types import ModelHealth

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from engine.backends import Backend
    from engine.config import ModelSpec
    from engine.types import ModelStatus

    Report = Callable[[str, float], None]
    Load = Callable[[ModelSpec, Report], Awaitable[Backend]]

_log = logging.getLogger("hearth.pool")

_LONGEST_BACKOFF_SECONDS = 60.0
_STEADY_SECONDS = 60.0  # a model that lived this long starts over with no back-off
_FIRST_LOAD_ATTEMPTS = 3


class Pool:
    """One slot per model, each looked after by one task. All methods belong to the event loop."""

    def __init__(self, specs: Iterable[ModelSpec], load: Load) -> None:
        self._slots = {spec.id: _Slot(spec) for spec in specs}
        self._load = load
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Begin to load every model and return at once."""
        for slot in self._slots.values():
            self._look_after(slot)

    def update(self, specs: Iterable[ModelSpec]) -> None:
        """Make the models those of `specs`, from now on and without cutting an answer short.

        New ones are loaded. Models that are gone, or for which another engine is needed, take no more requests, end
        with their last answer, and are loaded again as they are now. Everything else changes in place.
        """
        wanted = {spec.id: spec for spec in specs}
        for slot in self._slots.values():
            slot.want(wanted.get(slot.spec.id))
        for spec in wanted.values():
            self._slots.setdefault(spec.id, _Slot(spec))
        self._slots = {name: self._slots[name] for name in [*wanted, *(self._slots.keys() - wanted.keys())]}
        for slot in list(self._slots.values()):
            self._look_after(slot)
        self._changed.set()

    async def stop(self) -> None:
        """Stop loading and restarting, then end every model gracefully."""
        await self._cancel_tasks()
        await asyncio.gather(*(backend.shutdown() for backend in self._take_backends()))

    async def terminate(self) -> None:
        """The same at once: whatever runs is lost."""
        for backend in self._take_backends():
            backend.terminate()
        await self._cancel_tasks()

    def get(self, model: str) -> Backend:
        """Return the ready backend of `model`.

        Raises `UnknownModelError`, or an `UnavailableError` that says what is going on and for how long.
        """
        slot = self._slots.get(model)
        if slot is None or slot.wanted is None:
            raise UnknownModelError("There is no such model here. GET /v1/models lists the ones that you may use.")
        if slot.backend is None or slot.backend.died.is_set():
            raise slot.unavailable()
        return slot.backend

    async def revived(self, model: str) -> Backend:
        """Like `get`, but wait for a model that is being restarted after a death."""
        slot = self._slots.get(model)
        while slot is not None and slot.wanted is not None and slot.reviving():
            if slot.died:
                await slot.settled.wait()
            else:
                await asyncio.sleep(0)  # its task is about to notice
        return self.get(model)

    def health(self) -> tuple[ModelHealth, ...]:
        """What every model is doing, in the order of models.yaml."""
        return tuple(slot.health() for slot in self._slots.values() if slot.wanted is not None)

    async def wait_for_change(self) -> None:
        """Return when any model's state or phase has changed since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def _look_after(self, slot: _Slot) -> None:
        task = self._tasks.get(slot.spec.id)
        if task is not None and not task.done():
            return
        if slot.wanted is None:  # nothing to end: it was never loaded
            del self._slots[slot.spec.id]
        elif task is None or slot.stale.is_set():
            self._tasks[slot.spec.id] = asyncio.create_task(self._keep_loaded(slot), name=f"pool-{slot.spec.id}")

    async def _keep_loaded(self, slot: _Slot) -> None:
        while slot.renew():
            await self._keep_this_loaded(slot)
            if not slot.stale.is_set():  # it failed for good
                return
        del self._slots[slot.spec.id]

    async def _keep_this_loaded(self, slot: _Slot) -> None:
        """Load and restart it as it is configured, until that is changed or it fails for good."""
        quick_deaths = 0
        while not slot.stale.is_set():
            await _first_of(asyncio.sleep(backoff_seconds(quick_deaths)), slot.stale.wait())
            slot.enter("loading", "waiting for its turn", 0.0)
            self._changed.set()
            backend = await self._try_load(slot)
            if backend is None:
                quick_deaths += 1
                if slot.fatal or (slot.restarts == 0 and quick_deaths >= _FIRST_LOAD_ATTEMPTS):
                    return
                continue
            ready_at = time.monotonic()
            await _first_of(backend.died.wait(), slot.stale.wait())
            if backend.died.is_set():
                _log.error("%s: its engine process died; restarting it", slot.spec.id)
                slot.lost()
            else:
                slot.backend, slot.leaving = None, backend
                slot.enter("loading", "waiting for the last answers of its old configuration", 0.0)
                self._changed.set()
                await _first_of(backend.idle(), backend.died.wait())
            self._changed.set()
            await backend.shutdown()
            slot.leaving = None
            quick_deaths = 0 if time.monotonic() - ready_at > _STEADY_SECONDS else quick_deaths + 1

    async def _try_load(self, slot: _Slot) -> Backend | None:
        def report(phase: str, progress: float) -> None:
            loop.call_soon_threadsafe(self._report, slot, phase, progress)

        loop = asyncio.get_running_loop()
        try:
            slot.backend = await self._load(slot.spec, report)
        except LoadError as error:
            _log.error("%s cannot be loaded. %s", slot.spec.id, error.message)  # ours, no trace needed
            slot.fail(error.message, fatal=True)
        except Exception:  # noqa: BLE001  # a start can fail in any way that its libraries can think of
            _log.exception("%s: its engine did not start", slot.spec.id)
            slot.fail("The engine did not start; the server's log says why.", fatal=False)
        else:
            slot.enter("ready", "ready", 1.0)
            slot.error = None
        self._changed.set()
        return slot.backend

    def _report(self, slot: _Slot, phase: str, progress: float) -> None:
        if slot.status == "loading":
            slot.phase, slot.progress = phase, progress
            self._changed.set()

    def _take_backends(self) -> list[Backend]:
        slots = self._slots.values()
        taken = [backend for slot in slots for backend in (slot.backend, slot.leaving) if backend is not None]
        for slot in slots:
            slot.backend = slot.leaving = None
            slot.enter("unloaded", "stopped", 0.0)
        return taken

    async def _cancel_tasks(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def needs_another_engine(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether a model has to be loaded again for its entry to take effect."""
    in_place = {"tier", "owned_by", "description"}
    return old.model_dump(exclude=in_place) != new.model_dump(exclude=in_place)


def backoff_seconds(quick_deaths: int) -> float:
    """0 at first, then 1, 2, 4 ... up to a minute."""
    return 0.0 if quick_deaths == 0 else min(_LONGEST_BACKOFF_SECONDS, 2.0 ** (quick_deaths - 1))


@dataclass(slots=True)
class _Slot:
    spec: ModelSpec
    status: ModelStatus = "loading"
    phase: str = "waiting for its turn"
    progress: float = 0.0
    since: float = field(default_factory=time.monotonic)
    backend: Backend | None = None
    leaving: Backend | None = None  # takes no more requests and ends with its last answer
    restarts: int = 0
    died: bool = False
    error: str | None = None
    fatal: bool = False
    wanted: ModelSpec | None = field(init=False)  # None: it is to go
    stale: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # after a death: back again, or for good not

    def __post_init__(self) -> None:
        self.wanted = self.spec

    def want(self, spec: ModelSpec | None) -> None:
        """Take a new configuration: in place where that will do, else by way of `stale`."""
        self.wanted = spec
        if spec is None or needs_another_engine(self.spec, spec) or self.status == "failed":
            self.stale.set()
        else:
            self.spec = spec

    def renew(self) -> bool:
        """Begin with the configuration that is wanted now; False when there is none."""
        self.stale.clear()
        if self.wanted is None:
            return False
        self.spec, self.fatal = self.wanted, False
        return True

    def enter(self, status: ModelStatus, phase: str, progress: float) -> None:
        self.status, self.phase, self.progress, self.since = status, phase, progress, time.monotonic()
        self.died = self.died and status != "ready"
        if status in {"ready", "unloaded"}:
            self.settled.set()

    def lost(self) -> None:
        self.backend = None
        self.restarts += 1
        self.died = True
        self.settled.clear()
        self.enter("loading", "restarting after its engine died", 0.0)

    def fail(self, error: str, *, fatal: bool) -> None:
        self.error, self.fatal = error, fatal
        self.enter("failed", "failed", 0.0)
        if fatal:
            self.settled.set()

    def reviving(self) -> bool:
        """Whether its process died and it is going to be loaded again."""
        gone = self.backend is not None and self.backend.died.is_set()
        return gone or (self.died and not self.fatal and self.status != "unloaded")

    def unavailable(self) -> UnavailableError:
        if self.died or self.backend is not None:
            return engine_died()
        if self.status == "failed":
            return UnavailableError(
                "This model could not be loaded. Ask whoever runs this server: its log says why.",
                retry_after_seconds=None,
            )
        return ModelLoadingError(
            f"This model is still being loaded ({self.phase}). Try again in a few seconds.",
            retry_after_seconds=5 if self.progress >= 0.5 else 10,
        )

    def health(self) -> ModelHealth:
        return ModelHealth(
            id=self.spec.id,
            status=self.status,
            phase=self.phase,
            progress=self.progress,
            elapsed_seconds=round(time.monotonic() - self.since, 1),
            restarts=self.restarts,
            error=self.error,
        )

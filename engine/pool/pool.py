"""Keeps every configured model loaded: one task per model moves it from state to state; and who may use it right now.

How a model is loaded is left to the `load` function it is given (loader.py), what a state means, and when a failed one
is tried again, to model_state.py. Requests are not seen here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.admission import Admission, Room
from engine.backends import Backend, end
from engine.config import ChatModelSpec, ModelSpec
from engine.errors import LoadError, UnknownModelError
from engine.pool.eviction import Residency
from engine.pool.leases import Sharing
from engine.pool.memory import Holdings
from engine.pool.model_state import Slot
from engine.pool.times import LoadTimes
from engine.types import ChatRequest, ModelHealth, TextRequest, Urgency

Report = Callable[[str, float], None]
Load = Callable[[ModelSpec, Report], Awaitable[Backend]]

_log = logging.getLogger("hearth.pool")


class Pool:
    """One slot per model, each looked after by one task. All methods belong to the event loop."""

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        load: Load,
        residency: Residency | None = None,
        holdings: Holdings | None = None,
        times: LoadTimes | None = None,
    ) -> None:
        """`residency`: who takes turns; None: nobody. `holdings`: what they have now. `times`: of earlier loads."""
        self._new_slot = partial(Slot, times=times or LoadTimes())
        self._slots = {spec.id: self._new_slot(spec) for spec in specs}
        self._load = load
        self._sharing = Sharing(residency or Residency({}, {}), asyncio.get_running_loop().time, holdings)
        self._director: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._hopeless = asyncio.Event()
        self._stopping = False

    def start(self) -> None:
        """Begin to load every model that there is room for, and return at once."""
        self._director = asyncio.create_task(self._sharing.direct(), name="pool-turns")
        for slot in self._slots.values():
            self._look_after(slot)

    def update(
        self, specs: Iterable[ModelSpec], residency: Residency | None = None, outdated: Collection[str] = ()
    ) -> None:
        """Make the models those of `specs`, without cutting an answer short. New ones are loaded.

        Models that are gone, `outdated`, or in need of another engine take no more requests, end with their last
        answer, and are loaded again as they are now. All else changes in place.
        """
        wanted = {spec.id: spec for spec in specs}
        loaded = [name for name, slot in self._slots.items() if slot.status in {"loading", "ready"}]
        self._sharing.update(residency or Residency({}, {}), loaded)
        for slot in self._slots.values():
            slot.want(wanted.get(slot.spec.id))
            if slot.spec.id in outdated:
                slot.stale.set()
        self._sharing.going(name for name, slot in self._slots.items() if slot.stale.is_set())
        going = {name: slot for name, slot in self._slots.items() if name not in wanted}
        self._slots = {name: self._slots.get(name) or self._new_slot(spec) for name, spec in wanted.items()} | going
        for slot in list(self._slots.values()):
            self._look_after(slot)
        self._tell()

    async def stop(self) -> None:
        """Stop loading and restarting, then end every model gracefully."""
        self._stopping = True
        await self._cancel_tasks()
        await asyncio.gather(*(end(backend) for backend in self._take_backends()))

    async def terminate(self) -> None:
        """The same at once: whatever runs is lost."""
        self._stopping = True
        for backend in self._take_backends():
            backend.terminate()
        await self._cancel_tasks()

    def get(self, model: str) -> Backend:
        """Return the ready backend of `model`.

        Raises `UnknownModelError`, or an `UnavailableError` that says what is going on and for how long.
        """
        slot = self._slot(model)
        if slot.backend is None or slot.backend.died.is_set():
            raise slot.unavailable()
        return slot.backend

    @contextlib.asynccontextmanager
    async def using(self, model: str) -> AsyncIterator[None]:
        """Hold a model for a request: one that takes turns is waited for, and stays meanwhile. Others: see `get`."""
        await self.hold(model)
        try:
            yield
        finally:
            self.release(model)

    async def hold(self, model: str) -> None:
        """Hold it like `using`, until `release`."""
        self._slot(model)
        await self._sharing.hold(model, partial(self._is_loaded, model))

    def release(self, model: str) -> None:
        """Let go of a model that was held."""
        self._sharing.release(model)

    def _is_loaded(self, model: str) -> bool:
        slot = self._slot(model)
        if slot.status == "failed" or slot.died or self._stopping:
            self.get(model)
        return slot.backend is not None and not slot.backend.died.is_set()

    def _slot(self, model: str) -> Slot:
        slot = self._slots.get(model)
        if slot is None or slot.wanted is None:
            raise UnknownModelError("There is no such model here. GET /v1/models lists the ones that you may use.")
        return slot

    async def revived(self, model: str) -> None:
        """Wait for a model that is restarted after a death. Raises like `get`; if it takes turns, when it failed."""
        await self._slot(model).revived()
        look = self._is_loaded if self._sharing.shares(model) else self.get
        look(model)

    def health(self) -> tuple[ModelHealth, ...]:
        """What every model is doing, in the order of models.yaml."""
        wanted = [slot for slot in self._slots.values() if slot.wanted is not None]
        return tuple(replace(slot.health(), waiting=self._sharing.waiting(slot.spec.id)) for slot in wanted)

    async def wait_for_change(self) -> None:
        """Return when any model's state or phase has changed since the last call."""
        await self._changed.wait()
        self._changed.clear()

    @property
    def swaps(self) -> int:
        """How often a model has made room for another."""
        return self._sharing.swaps

    async def hopeless(self) -> None:
        """Return when every model has failed for good: nothing can be served until somebody changes something."""
        await self._hopeless.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._sharing.woken()
        wanted = [slot for slot in self._slots.values() if slot.wanted is not None]
        if wanted and all(slot.given_up for slot in wanted):
            self._hopeless.set()
        else:
            self._hopeless.clear()

    def _look_after(self, slot: Slot) -> None:
        task = self._tasks.get(slot.spec.id)
        if task is not None and not task.done():
            return
        if slot.wanted is None:  # nothing to end: it is not loaded
            self._forget(slot)
        elif task is None or slot.stale.is_set():
            self._tasks[slot.spec.id] = asyncio.create_task(self._keep_loaded(slot), name=f"pool-{slot.spec.id}")

    async def _keep_loaded(self, slot: Slot) -> None:
        while slot.renew():
            await self._keep_this_loaded(slot)
            if not slot.stale.is_set():  # it failed for good, or all is to end
                return
        slot.settled.set()  # whoever waits for it is told that it is gone
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        del self._slots[slot.spec.id]
        self._tasks.pop(slot.spec.id, None)

    async def _keep_this_loaded(self, slot: Slot) -> None:
        """Load and restart it as it is configured, until that is changed or it fails for good."""
        while not (slot.stale.is_set() or slot.given_up or self._stopping):
            await first_of(asyncio.sleep(slot.streak.pause_seconds), slot.stale.wait())
            if slot.stale.is_set() or not await self._has_room(slot):
                return
            slot.enter("loading", "waiting for its turn", 0.0)
            self._tell()
            backend = await self._try_load(slot)
            if backend is not None:
                self._sharing.loaded(slot.spec.id)
                await self._live(slot, backend)
            if slot.stale.is_set() or slot.status != "loading" or not self._sharing.has_room(slot.spec.id):
                self._sharing.left(slot.spec.id)  # else it starts again, in the room that it has
            self._tell()

    async def _has_room(self, slot: Slot) -> bool:
        """Wait for the turn of a model that shares memory. False: it is to become something else first."""
        name = slot.spec.id
        if not (self._sharing.has_room(name) or slot.status == "unloaded"):
            slot.enter("unloaded", "not loaded: it shares memory with others, and is loaded when it is asked for", 0.0)
            self._tell()
        await first_of(self._sharing.turn_to_load(name), slot.stale.wait())
        if slot.stale.is_set():
            self._sharing.left(name)
        return not slot.stale.is_set()

    async def _live(self, slot: Slot, backend: Backend) -> None:
        """See it through to its end: by death, because it is to be replaced, or because it makes room for another."""
        while await self._stays(slot, backend) and await self._slept(slot, backend):
            slot.become_ready(backend)
            self._sharing.loaded(slot.spec.id)
            self._tell()
        slot.backend, slot.leaving = None, backend
        if backend.died.is_set():
            _log.error("%s: its engine is gone", slot.spec.id)
            slot.lose()
            self._tell()
        elif slot.stale.is_set():
            slot.enter("loading", "waiting for the last answers of its old configuration", 0.0)
            self._tell()
            await first_of(backend.idle(), backend.died.wait())
        elif slot.status != "unloaded":
            slot.enter("unloaded", "made room for another model", 0.0)
            self._tell()
        await end(backend)
        slot.leaving = None

    async def _stays(self, slot: Slot, backend: Backend) -> bool:
        """Wait while it answers. True: it is to make room, and nobody uses it any more. False: it is at its end."""
        await first_of(backend.died.wait(), slot.stale.wait(), self._sharing.turn_to_leave(slot.spec.id))
        if not (backend.died.is_set() or slot.stale.is_set()):
            await first_of(backend.died.wait(), slot.stale.wait(), self._sharing.unused(slot.spec.id))
        return not (backend.died.is_set() or slot.stale.is_set())

    async def _slept(self, slot: Slot, backend: Backend) -> bool:
        """Have it make room and come back when its turn comes. False: it could not, or is to become something else."""
        name = slot.spec.id
        _log.info("%s makes room for another model", name)
        slot.backend, slot.leaving = None, backend
        slot.enter("sleeping", "makes room for another model", 0.0)
        self._tell()
        if not await backend.sleep():
            return False
        slot.enter_phase("asleep: its weights wait in RAM until it is asked for")
        self._sharing.left(name, asleep=True)
        self._tell()
        await first_of(self._sharing.turn_to_load(name), backend.died.wait(), slot.stale.wait())
        if backend.died.is_set() or slot.stale.is_set():
            return False
        try:
            await backend.wake()
        except Exception:  # noqa: BLE001  # whatever vLLM can think of: it is loaded anew
            _log.exception("%s did not wake up; it is loaded anew", name)
            return False
        slot.leaving = None
        return True

    async def _try_load(self, slot: Slot) -> Backend | None:
        def report(phase: str, progress: float) -> None:
            loop.call_soon_threadsafe(self._report, slot, phase, progress)

        loop = asyncio.get_running_loop()
        try:
            backend = await self._load(slot.spec, report)
        except LoadError as error:
            _log.error("%s cannot be loaded. %s", slot.spec.id, error.message)  # ours, no trace needed
            slot.refuse(error.message)
            self._tell()
            return None
        except Exception:  # noqa: BLE001  # a start can fail in any way that its libraries can think of
            _log.exception("%s: its engine did not start", slot.spec.id)
            slot.fail()
            self._tell()
            return None
        slot.become_ready(backend)
        self._tell()
        return backend

    def _report(self, slot: Slot, phase: str, progress: float) -> None:
        if slot.status == "loading":
            slot.load_on(phase, progress)
            self._changed.set()

    def _take_backends(self) -> list[Backend]:
        slots = self._slots.values()
        taken = [backend for slot in slots for backend in (slot.backend, slot.leaving) if backend is not None]
        for slot in slots:
            slot.backend = slot.leaving = None
            slot.enter("unloaded", "stopped", 0.0)
        self._tell()
        return taken

    async def _cancel_tasks(self) -> None:
        tasks = [*self._tasks.values(), *([self._director] if self._director is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when the first of them ends; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Entrance:
    """One per engine. All methods belong to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._admissions: dict[str, Admission] = {}

    def size(self, specs: Iterable[ModelSpec]) -> None:
        """Take on these models, or their new sizes; what runs goes on."""
        for spec in specs:
            if not isinstance(spec, ChatModelSpec):
                continue
            sequences = spec.engine.max_num_seqs - spec.engine.places_for_people
            room = Room.before_rendering(sequences, beside_interactive=max(1, sequences // 32))
            if spec.id in self._admissions:
                self._admissions[spec.id].resize(room)
            else:
                self._admissions[spec.id] = Admission(room)

    async def enter(self, request: ChatRequest | TextRequest, sequences: int) -> Callable[[], None]:
        """Hold background work back, or wait as background work; and acquire the model. Returns what releases both.

        What is not interactive waits for its model if that is being restarted. Raises what `Pool.get` does, the model
        need not be one that takes turns and has its turn.
        """
        model, pool = request.model, self._pool
        if request.urgency != Urgency.INTERACTIVE:
            return await self._enter_background(request, sequences)
        await pool.hold(model)
        try:
            pool.get(model)
            self._admissions[model].begin_interactive()
        except BaseException:
            pool.release(model)
            raise

        def release() -> None:
            self._admissions[model].end_interactive()
            pool.release(model)

        return release

    async def _enter_background(self, request: ChatRequest | TextRequest, sequences: int) -> Callable[[], None]:
        model, pool = request.model, self._pool
        await pool.revived(model)  # before it waits: an unknown model is refused at once
        ticket = self._admissions[model].enter(
            request.owner,
            prompt_tokens=sequences,  # tokens are not known before it is rendered
            max_tokens=0,
            sequences=sequences,
            weight=request.queue_share,
            urgency=request.urgency,
        )
        await ticket.begin()
        try:
            await pool.hold(model)
            try:
                await pool.revived(model)
            except BaseException:
                pool.release(model)
                raise
        except BaseException:
            ticket.end(cut_off=True)
            raise

        def release() -> None:
            pool.release(model)
            ticket.end(cut_off=False)

        return release

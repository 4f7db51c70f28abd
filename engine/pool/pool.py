"""Keeps every configured model loaded: one task per model moves it from state to state; and leases models to requests.

A replica is a model of its own here; the pool also decides which engine of a model gets a request.

The `load` function (loader.py) loads a model; model_state.py says what a state means, and when a failed model is tried
again; memory.py says which models have memory.
"""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.admission import Admission, Room, beside_interactive
from engine.backends import Backend, end
from engine.config import ChatModelSpec, ModelSpec
from engine.config.models import model_of
from engine.errors import EngineError, LoadError, UnknownModelError
from engine.placement.hardware import count_oom_kills
from engine.pool.memory import Ledger
from engine.pool.model_state import ModelState
from engine.pool.records import LoadTimes
from engine.types import GenerationRequest, ModelHealth, Report, Urgency

Load = Callable[[ModelSpec, Report], Awaitable[Backend]]

_log = logging.getLogger("hearth.pool")

# How many more requests than the least loaded engine the one that caches a key's prefixes may have.
_MORE_FOR_PREFIXES = 4


class Pool:
    """One state and one task per model. All methods belong to the event loop."""

    def __init__(
        self, specs: Iterable[ModelSpec], load: Load, ledger: Ledger | None = None, times: LoadTimes | None = None
    ) -> None:
        """`ledger`: the memory that models share; None: there is enough. `times`: how long earlier loads took."""
        self._load = load
        self._ledger = ledger or Ledger()
        self._new_model = partial(ModelState, times=times or LoadTimes(), changed=self._ledger.changes.notify)
        self._models = {spec.id: self._new_model(spec) for spec in specs}
        self._admissions: dict[str, Admission] = {}  # of batch and background requests, before their lease
        self._sort()
        self._director: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    def start(self) -> None:
        """Begin to load every model that has memory, and return at once."""
        self._ledger.fill()
        self._director = asyncio.create_task(self._ledger.run(), name="pool-director")
        for model in self._models.values():
            self._look_after(model)

    def update(self, specs: Iterable[ModelSpec], outdated: Collection[str] = ()) -> None:
        """Make the models those of `specs`, without cutting an answer short; new ones are loaded.

        The ledger has the new plan already. Models that are not in `specs`, that are `outdated`, or that need another
        engine take no more requests and end with their last answer; those in `specs` are loaded again. All else changes
        in place.
        """
        wanted = {spec.id: spec for spec in specs}
        for name, model in self._models.items():
            model.want(wanted.get(name))
            if name in outdated:
                model.stale.set()
        self._ledger.end_soon(name for name, model in self._models.items() if model.stale.is_set())
        ending = {name: model for name, model in self._models.items() if name not in wanted}
        self._models = {name: self._models.get(name) or self._new_model(spec) for name, spec in wanted.items()} | ending
        self._sort()
        for model in list(self._models.values()):
            self._look_after(model)
        self._ledger.changes.notify()

    def ending(self) -> set[str]:
        """Return the models whose loaded engines all end with their last answer."""
        loaded = {name for name, model in self._models.items() if model.backend is not None}
        staying = {model_of(name) for name in loaded if not self._models[name].stale.is_set()}
        return {model_of(name) for name in loaded} - staying

    async def stop(self) -> None:
        self._stopping = True
        await self._cancel_tasks()
        await asyncio.gather(*(end(backend) for backend in self._take_backends()))

    async def terminate(self) -> None:
        """Stop at once: running requests are lost."""
        self._stopping = True
        for backend in self._take_backends():
            backend.terminate()
        await self._cancel_tasks()

    def get(self, name: str) -> Backend:
        """Return the ready backend of a model.

        Raises `UnknownModelError`, or an `UnavailableError` that says what is going on and for how long.
        """
        model = self._model(name)
        if model.backend is None or model.backend.died.is_set():
            raise model.unavailable()
        return model.backend

    async def acquire(self, name: str) -> contextlib.ExitStack:
        """Lease a model until what is returned is closed. Waits for an evictable one; of others `get` raises."""
        self._model(name)  # raises if it is unknown
        return await self._ledger.acquire(name, partial(self._is_loaded, name))

    def engines_of(self, model: str) -> list[str]:
        """Return the names of a model's engines, its own first."""
        return self._engines.get(model, [model])

    def engine_for(self, model: str, owner: str) -> str:
        """Return the engine of a model that a request of this owner is best sent to.

        An owner has one of the ready engines, which caches the prefixes of its requests: that one, unless it is clearly
        more loaded than the least loaded one. If none is ready, one that has not failed.
        """
        names = self.engines_of(model)
        if len(names) == 1:
            return names[0]
        ready = [name for name in names if self.is_ready(name)]
        if not ready:
            return next((name for name in names if self._models[name].status != "failed"), names[0])
        loads = {name: self._ledger.leases(name) + self._admissions[name].waiting for name in ready}
        own = max(ready, key=lambda name: zlib.crc32(f"{owner} {name}".encode()))
        least = min(ready, key=loads.__getitem__)
        return own if loads[own] < loads[least] + _MORE_FOR_PREFIXES else least

    def is_ready(self, name: str) -> bool:
        with contextlib.suppress(EngineError):
            return self.get(name) is not None
        return False

    def load_again(self, name: str) -> None:
        """Try again to load a model that has failed. Raises `UnknownModelError`."""
        model = self._model(name)
        if model.status == "failed":
            model.stale.set()
            self._look_after(model)

    def evict(self, name: str) -> bool:
        """Evict a model once its last lease ends. False: it is never evicted."""
        self._model(name)
        return self._ledger.evict(name)

    async def acquire_for(self, request: GenerationRequest, sequences: int) -> contextlib.ExitStack:
        """Lease the model of a request with so many sequences. Closing what is returned releases it.

        An interactive request holds back batch and background ones. These are admitted before the lease, and wait for a
        model that is being restarted. In the other order a request with a lease could wait for a place whose owner
        waits for that lease to end (deadlock). Raises like `get`.
        """
        name, interactive = request.model, request.urgency == Urgency.INTERACTIVE
        with contextlib.ExitStack() as acquired:
            if not interactive:
                await self.revived(name)  # first: an unknown model is refused at once
                admission = self._admissions[name]
                ticket = admission.enter(
                    request.owner,
                    prompt_tokens=sequences,  # nothing is rendered yet, so tokens are not known
                    max_tokens=0,
                    sequences=sequences,
                    weight=request.queue_share,
                    urgency=request.urgency,
                )
                await admission.begin(ticket)
                acquired.callback(admission.end, ticket, cut_off=False)
            acquired.enter_context(await self.acquire(name))
            if interactive:
                self.get(name)
                self._admissions[name].begin_interactive()
                acquired.callback(self._admissions[name].end_interactive)
            else:
                await self.revived(name)
            return acquired.pop_all()

    def _sort(self) -> None:
        """Note which engines each model has, and how many batch requests may run in each."""
        self._engines: dict[str, list[str]] = {}
        for name, model in self._models.items():
            spec = model.wanted
            if spec is not None:
                self._engines.setdefault(model_of(name), []).append(name)
            if not isinstance(spec, ChatModelSpec):
                continue
            sequences = spec.engine.max_num_seqs - spec.engine.places_for_interactive
            room = Room(sequences, waiting=0, beside_interactive=beside_interactive(sequences))
            self._admissions.setdefault(spec.id, Admission(room)).resize(room)

    def _is_loaded(self, name: str) -> bool:
        model = self._model(name)
        if model.status == "failed" or model.died or self._stopping:
            self.get(name)
        return model.backend is not None and not model.backend.died.is_set()

    def _model(self, name: str) -> ModelState:
        model = self._models.get(name)
        if model is None or model.wanted is None:
            raise UnknownModelError("There is no such model here. GET /v1/models lists the ones that you may use.")
        return model

    async def revived(self, name: str) -> None:
        """Wait for a model that restarts after a death. Raises like `get`; if it shares memory, only if it failed."""
        model = self._model(name)
        await self._ledger.changes.until(lambda: not model.reviving())
        look = self._is_loaded if self._ledger.is_evictable(name) else self.get
        look(name)

    def health(self) -> tuple[ModelHealth, ...]:
        waiting = self._ledger.waiting
        return tuple(replace(model.health(), waiting=waiting(model.spec.id)) for model in self._wanted())

    async def wait_for_change(self) -> None:
        await self._ledger.changes.wait()

    async def hopeless(self) -> None:
        await self._ledger.changes.until(self.is_hopeless)

    def is_hopeless(self) -> bool:
        wanted = self._wanted()
        return bool(wanted) and all(model.given_up for model in wanted)

    def _wanted(self) -> list[ModelState]:
        return [model for model in self._models.values() if model.wanted is not None]

    def _look_after(self, model: ModelState) -> None:
        task = self._tasks.get(model.spec.id)
        if task is not None and not task.done():
            return
        if model.wanted is None:  # nothing to end: it is not loaded
            self._forget(model)
        elif task is None or model.stale.is_set():
            self._tasks[model.spec.id] = asyncio.create_task(self._keep_loaded(model), name=f"pool-{model.spec.id}")

    async def _keep_loaded(self, model: ModelState) -> None:
        while model.renew():
            await self._keep_this_loaded(model)
            if not model.stale.is_set():  # it failed for good, or all is to end
                return
        self._forget(model)
        self._ledger.changes.notify()  # requests that wait for it check again

    def _forget(self, model: ModelState) -> None:
        del self._models[model.spec.id]
        self._tasks.pop(model.spec.id, None)

    async def _keep_this_loaded(self, model: ModelState) -> None:
        """Load and restart it as it is configured, until that is changed or it fails for good."""
        while not (model.stale.is_set() or model.given_up or self._stopping):
            await first_of(asyncio.sleep(model.streak.pause_seconds), model.stale.wait())
            if model.stale.is_set() or not await self._memory_granted(model):
                return
            model.enter("loading", "queued for loading")
            backend = await self._try_load(model)
            if backend is not None:
                self._ledger.loaded(model.spec.id)
                await self._live(model, backend)
            if model.stale.is_set() or model.status != "loading" or not self._ledger.has_memory(model.spec.id):
                self._ledger.release(model.spec.id)  # else it restarts in the memory that it has

    async def _memory_granted(self, model: ModelState) -> bool:
        """Wait for memory, if the model shares it. False: its configuration changes first."""
        name = model.spec.id
        if not self._ledger.has_memory(name):
            self._ledger.release(name)  # evicted while it was being restarted
            if model.status != "unloaded":
                reason = "not loaded: it shares memory with others, and is loaded when it is asked for"
                model.enter("unloaded", reason)
        await first_of(self._ledger.until_granted(name), model.stale.wait())
        if model.stale.is_set():
            self._ledger.release(name)
        return not model.stale.is_set()

    async def _live(self, model: ModelState, backend: Backend) -> None:
        """Return when the engine has ended: it died, is to be replaced, or was evicted."""
        oom_kills = count_oom_kills()
        while await self._stays(model, backend) and await self._slept_and_woke(model, backend):
            model.become_ready(backend)
            self._ledger.loaded(model.spec.id)
        model.backend, model.leaving = None, backend
        if backend.died.is_set():
            _log.error("%s: its engine is gone", model.spec.id)
            model.lose(count_oom_kills() - oom_kills)
        elif model.stale.is_set():
            model.enter("loading", "waiting for the last answers of its old configuration")
            await first_of(backend.idle(), backend.died.wait())
        elif model.status != "unloaded":
            model.enter("unloaded", "evicted: others need its memory")
        await end(backend)
        model.leaving = None

    async def _stays(self, model: ModelState, backend: Backend) -> bool:
        """Wait while the engine answers. True: it is evicted, without leases. False: it has to end."""
        await first_of(backend.died.wait(), model.stale.wait(), self._ledger.until_evicted(model.spec.id))
        return not (backend.died.is_set() or model.stale.is_set())

    async def _slept_and_woke(self, model: ModelState, backend: Backend) -> bool:
        """Have the model sleep, and wake it when there is memory. False: it could not, or its configuration changes."""
        name = model.spec.id
        _log.info("%s is evicted", name)
        model.backend, model.leaving = None, backend
        model.enter("sleeping", "evicted: others need its memory")
        if not await backend.sleep():
            return False
        model.enter("sleeping", "asleep: its weights wait in RAM until it is asked for")
        self._ledger.release(name, asleep=True)
        await first_of(self._ledger.until_granted(name), backend.died.wait(), model.stale.wait())
        if backend.died.is_set() or model.stale.is_set():
            return False
        try:
            await backend.wake()
        except Exception:  # noqa: BLE001  # any error of vLLM: it is loaded again
            _log.exception("%s did not wake up; it is loaded again", name)
            return False
        model.leaving = None
        return True

    async def _try_load(self, model: ModelState) -> Backend | None:
        def report(phase: str, progress: float) -> None:
            loop.call_soon_threadsafe(model.load_on, phase, progress)

        loop = asyncio.get_running_loop()
        oom_kills = count_oom_kills()
        try:
            backend = await self._load(model.spec, report)
        except LoadError as error:
            _log.error("%s cannot be loaded. %s", model.spec.id, error.message)  # ours, no trace needed
            model.refuse(error.message)
            return None
        except Exception as error:  # noqa: BLE001  # libraries raise anything at a start
            _log.exception("%s: its engine did not start", model.spec.id)
            said = f"{type(error).__name__}; the log has the details."
            cause = error.message if isinstance(error, EngineError) else said
            model.fail(cause, count_oom_kills() - oom_kills)
            return None
        model.become_ready(backend)
        return backend

    def _take_backends(self) -> list[Backend]:
        models = self._models.values()
        taken = [backend for model in models for backend in (model.backend, model.leaving) if backend is not None]
        for model in models:
            model.backend = model.leaving = None
            model.enter("unloaded", "stopped")
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

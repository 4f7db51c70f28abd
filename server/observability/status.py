"""How the server stands, as `hearth status --json` and `GET /v1/admin/status` show it: models, memory, queues, GPUs.

`Status` is what they show, with sizes in bytes; `LastMinute` counts what models did just now, since Prometheus keeps
the rest; `read_status` gathers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import psutil
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from engine import ModelHealth, ModelLoad
from engine.placement.hardware import Gpu, Hardware, read_hardware
from server.observability.moments import iso
from server.settings import Settings

SPAN_SECONDS = 60.0


class _Part(BaseModel):
    # What a server of another release adds is not for us
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ServedWith(_Part):
    """What a model was loaded with."""

    source: Literal["own", "variant", "demo"]
    """own: the folder that models.yaml names. variant: what the plan chose. demo: what comes with Hearth."""
    folder: str
    """Below the weights directory; of a demo, its name."""
    compiled: bool | None = None
    """Whether it runs compiled; null: not a chat model."""


class Memory(_Part):
    """What a model takes. null: not known, or nothing."""

    planned_gpu_bytes: int | None
    """On all of its GPUs together."""
    planned_ram_bytes: int | None
    next_gpu_bytes: int | None = None
    """What its next load takes, on all of its GPUs together, where that is not what it was loaded with."""
    next_ram_bytes: int | None = None
    gpu_bytes: int | None
    """What its processes hold on GPUs, by the driver."""
    ram_bytes: int | None
    """What its processes have for themselves (USS): what would be free without them."""


class LastMinuteWork(_Part):
    """Of answers that ended in the last minute, or since the start if that is shorter."""

    seconds: float
    tokens_per_second: float
    images: int
    audio_seconds: float


class ModelState(_Part):
    """One model."""

    id: str
    status: Literal["unloaded", "loading", "ready", "sleeping", "failed"]
    phase: str
    progress: float
    for_seconds: float
    """How long it has been in this state."""
    remaining_seconds: float | None = None
    """How long a load should take yet, going by the last one of this model; null where that is not known."""
    reason: str | None
    """Why it is not ready; for the operator, it may name files."""
    restarts: int
    """Deaths of its process since the start."""
    served_with: ServedWith | None
    """null: it is not loaded."""
    gpus: list[int]
    memory: Memory
    pids: list[int]
    running: int
    """Sequences, images or texts at work."""
    waiting: int
    """Requests that wait for their turn, or for the model to be loaded."""
    last_minute: LastMinuteWork


class GpuHolder(_Part):
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    used_bytes: int | None
    """null: the driver does not say, as in some containers."""
    model: str | None
    """Whose it is, if it is one of ours."""


class GpuState(_Part):
    """One GPU."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    others_bytes: int
    """Of it, what is not Hearth's."""
    holders: list[GpuHolder]


class Paths(_Part):
    """What the server was started with, so that a command can tell whether it looks at the same."""

    data_dir: str
    weights_dir: str
    models: str
    tls_cert: str | None
    tls_key: str | None = None


class Status(_Part):
    """How the server stands at one moment."""

    object: Literal["status"] = "status"
    status: Literal["ready", "loading", "failed", "draining"]
    """failed: at least one model has failed; the others may answer."""
    version: str
    pid: int
    base_url: str | None
    """For clients on this machine."""
    started_at: str
    uptime_seconds: float
    requests_running: int
    """HTTP requests that are being answered."""
    swaps: int
    """How often a model has made room for another since the start."""
    ram_total_bytes: int
    ram_available_bytes: int
    models: list[ModelState]
    gpus: list[GpuState]
    no_gpus: str | None
    """Why GPUs could not be asked for."""
    paths: Paths


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts of answers that have ended."""

    tokens: int = 0
    images: int = 0
    audio_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.images + other.images, self.audio_seconds + other.audio_seconds)


class LastMinute:
    """What each model has done in the last minute. At most one entry per model and second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._done: dict[str, deque[tuple[int, Work]]] = {}

    @property
    def seconds(self) -> float:
        """The time that `of` covers: a minute, or since the start."""
        return min(SPAN_SECONDS, max(self._clock() - self._began_at, 1.0))

    def add(self, model: str, work: Work) -> None:
        """Count an answer that has ended."""
        second, done = int(self._clock()), self._done.setdefault(model, deque())
        if done and done[-1][0] == second:
            work += done.pop()[1]
        done.append((second, work))
        self._drop_old(done)

    def of(self, model: str) -> Work:
        """Return what this model has done."""
        done = self._done.get(model, deque())
        self._drop_old(done)
        return sum((work for _, work in done), Work())

    def _drop_old(self, done: deque[tuple[int, Work]]) -> None:
        oldest = int(self._clock()) - SPAN_SECONDS
        while done and done[0][0] <= oldest:
            done.popleft()


async def read_status(app: FastAPI) -> Status:
    """Look at everything once. What belongs to the event loop is read on it, processes and GPUs in a thread (50 ms)."""
    engine, drain, settings = app.state.engine, app.state.drain, app.state.settings
    health, swaps, running = engine.health(), engine.swaps, drain.running
    loads = {load.id: load for load in engine.loads()}
    draining, recent = drain.draining, app.state.metrics.last_minute
    families, ram, hardware = await asyncio.to_thread(_inspect, {name: load.pids for name, load in loads.items()})
    gpus = [_gpu(gpu, families) for gpu in hardware.gpus]
    states = [
        _model(one, loads.get(one.id), _memory(loads.get(one.id), ram.get(one.id), gpus), recent) for one in health
    ]
    started_at = psutil.Process().create_time()
    return Status(
        status="draining" if draining else _overall(health),
        version=importlib.metadata.version("hearth-inference"),
        pid=os.getpid(),
        base_url=app.state.base_url,
        started_at=iso(datetime.fromtimestamp(started_at, UTC)) or "",
        uptime_seconds=round(time.time() - started_at, 1),
        requests_running=running,
        swaps=swaps,
        ram_total_bytes=hardware.ram_bytes,
        ram_available_bytes=hardware.ram_available_bytes,
        models=states,
        gpus=gpus,
        no_gpus=hardware.problem,
        paths=_paths(settings),
    )


def _overall(models: Sequence[ModelHealth]) -> Literal["ready", "loading", "failed"]:
    found = {health.status for health in models}
    return "failed" if "failed" in found else "loading" if "loading" in found else "ready"


def _paths(settings: Settings) -> Paths:
    return Paths(
        data_dir=str(settings.data_dir.absolute()),
        weights_dir=str(settings.weights_dir.absolute()),
        models=str(settings.models.absolute()),
        tls_cert=None if settings.tls_cert is None else str(settings.tls_cert.absolute()),
        tls_key=None if settings.tls_key is None else str(settings.tls_key.absolute()),
    )


def _inspect(pids: Mapping[str, Sequence[int]]) -> tuple[dict[int, str], dict[str, int], Hardware]:
    """Return whose each process is, what the models' processes have in RAM, and the machine. Blocks."""
    families: dict[int, str] = {}
    ram: dict[str, int] = {}
    for model, own in pids.items():
        for process in _family(own):
            families[process.pid] = model
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                ram[model] = ram.get(model, 0) + process.memory_full_info().uss
    return families, ram, read_hardware(server_pid=os.getpid())


def _family(pids: Sequence[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def _gpu(gpu: Gpu, families: Mapping[int, str]) -> GpuState:
    holders = [
        GpuHolder(pid=one.pid, name=one.name, used_bytes=one.used_bytes, model=families.get(one.pid))
        for one in gpu.holders
    ]
    return GpuState(
        index=gpu.index,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.total_bytes - gpu.free_bytes,
        others_bytes=gpu.foreign_bytes,
        holders=holders,
    )


def _memory(load: ModelLoad | None, ram_bytes: int | None, gpus: Sequence[GpuState]) -> Memory:
    planned = load.served.planned_bytes if load is not None and load.served is not None else {}
    on_gpus = [size for place, size in planned.items() if place is not None]
    later = (None if load is None else load.later_bytes) or {}
    name = None if load is None else load.id
    used_bytes = [one.used_bytes for gpu in gpus for one in gpu.holders if name is not None and one.model == name]
    known = [used for used in used_bytes if used is not None]
    return Memory(
        planned_gpu_bytes=sum(on_gpus) or None,
        planned_ram_bytes=planned.get(None),
        next_gpu_bytes=sum(size for place, size in later.items() if place is not None) or None,
        next_ram_bytes=later.get(None),
        gpu_bytes=sum(known) if known and len(known) == len(used_bytes) else None,
        ram_bytes=ram_bytes,
    )


def _served_with(load: ModelLoad | None) -> ServedWith | None:
    if load is None or load.served is None:
        return None
    return ServedWith(source=load.served.source, folder=load.served.folder, compiled=load.compiled)


def _without_name(reason: str | None, model: str) -> str | None:
    """Drop the name that some reasons begin with, since the reader is told the model first."""
    return None if reason is None else reason.removeprefix(f"{model}: ")


def _model(health: ModelHealth, load: ModelLoad | None, memory: Memory, recent: LastMinute) -> ModelState:
    served = None if load is None else load.served
    work = recent.of(health.id)
    return ModelState(
        id=health.id,
        status=health.status,
        phase=health.phase,
        progress=health.progress,
        for_seconds=health.elapsed_seconds,
        remaining_seconds=health.remaining_seconds,
        reason=_without_name(health.error or health.reason, health.id),
        restarts=health.restarts,
        served_with=_served_with(load),
        gpus=[] if served is None else [place for place in served.planned_bytes if place is not None],
        memory=memory,
        pids=[] if load is None else list(load.pids),
        running=0 if load is None else load.running,
        waiting=health.waiting + (0 if load is None else load.waiting),
        last_minute=LastMinuteWork(
            seconds=round(recent.seconds, 1),
            tokens_per_second=round(work.tokens / recent.seconds, 1),
            images=work.images,
            audio_seconds=round(work.audio_seconds, 1),
        ),
    )

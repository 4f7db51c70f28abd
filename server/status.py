"""Gathers how the server stands: models, memory, queues, GPUs. Who may ask is status_socket.py's and the route's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import psutil

from engine.placement.hardware import read_hardware
from server.moments import iso
from server.schemas.status import (
    GpuHolder,
    GpuState,
    LastMinuteWork,
    Memory,
    ModelState,
    Paths,
    ServedWith,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI

    from engine import ModelHealth, ModelLoad
    from engine.placement.hardware import Gpu, Hardware
    from server.settings import Settings
    from server.status_recent import LastMinute


async def read_status(app: FastAPI) -> Status:
    """Look at everything once. What belongs to the event loop is read on it, processes and GPUs in a thread (50 ms)."""
    engine, drain, settings = app.state.engine, app.state.drain, app.state.settings
    health, swaps, running = engine.health(), engine.swaps, drain.running
    loads = {load.id: load for load in engine.loads()}
    draining, recent = drain.draining, app.state.metrics.last_minute
    families, ram, hardware = await asyncio.to_thread(_look, {name: load.pids for name, load in loads.items()})
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


def _look(pids: Mapping[str, Sequence[int]]) -> tuple[dict[int, str], dict[str, int], Hardware]:
    """Return whose each process is, what the models' processes have in RAM, and the machine. Blocks."""
    families: dict[int, str] = {}
    ram: dict[str, int] = {}
    for model, own in pids.items():
        for process in _family(own):
            families[process.pid] = model
            with contextlib.suppress(psutil.Error):  # gone by now
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
    held = [one.used_bytes for gpu in gpus for one in gpu.holders if name is not None and one.model == name]
    known = [used for used in held if used is not None]
    return Memory(
        planned_gpu_bytes=sum(on_gpus) or None,
        planned_ram_bytes=planned.get(None),
        next_gpu_bytes=sum(size for place, size in later.items() if place is not None) or None,
        next_ram_bytes=later.get(None),
        gpu_bytes=sum(known) if known and len(known) == len(held) else None,
        ram_bytes=ram_bytes,
    )


def _served_with(load: ModelLoad | None) -> ServedWith | None:
    if load is None or load.served is None:
        return None
    return ServedWith(source=load.served.source, folder=load.served.folder, compiled=load.compiled)


def _without_name(reason: str | None, model: str) -> str | None:
    """Drop the name that some reasons begin with, since whoever shows one says first whose it is."""
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

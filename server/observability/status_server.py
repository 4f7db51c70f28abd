"""The server's end of its status: gathers it, and answers at the socket where `ask` asks.

`Lately` keeps in memory what went wrong: requests that were refused or failed, and lines of our own log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import shutil
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import psutil
from fastapi import FastAPI
from prometheus_client.metrics_core import Metric

from engine import ModelHealth, ModelLoad
from engine.config.models import model_of
from engine.placement.hardware import Gpu, Hardware, read_hardware
from server.observability.access_log import RequestRecord
from server.observability.metrics import METHODS, Answered, LastMinute, Metrics, read_page
from server.observability.status import (
    FILE,
    EngineState,
    GpuHolder,
    GpuState,
    LastMinuteRequests,
    LastMinuteWork,
    LogLine,
    MachineState,
    Memory,
    ModelState,
    Paths,
    Question,
    Refusal,
    Refusals,
    ReplicaStatus,
    ServedWith,
    Status,
    near,
)
from server.settings import reserve_bytes
from server.store.usage import Usage
from server.validation import iso

_log = logging.getLogger("hearth.status")
_VERSION = importlib.metadata.version("hearth-inference")  # reads a file
_STARTED_AT = time.time()  # not this process's start: scripts/serve may have set up in it for minutes
_SHOWN = 5
_REFUSALS = 1000
_LINES = 50
_QUESTION_SECONDS = 10.0
INSPECTED_SECONDS = 30.0
# The engine of each process, the RAM of each engine's processes, and the machine.
Inspection: TypeAlias = tuple[dict[int, str], dict[str, int], Hardware]


class Peers(Protocol):
    """The replicas of a cluster, this one among them."""

    async def statuses(self) -> list[ReplicaStatus]: ...

    async def machines(self) -> list[MachineState]: ...

    async def metrics(self) -> list[Metric]: ...


def degraded(app: FastAPI) -> str | None:
    """Say what does not work in a server that answers; None: nothing. Anyone may read it."""
    if app.state.database.failing is not None:
        return "The key database fails: recently used keys still work for a while, all others get 503."
    if app.state.database.unwritable is not None:
        return (
            "The key database cannot be written, as when its disk is full: keys still work, changes of keys get 503, "
            "and usage waits in memory."
        )
    settings = app.state.settings
    if shutil.disk_usage(settings.data_dir).free < reserve_bytes(settings):
        return "Less of the disk is free than HEARTH_DISK_RESERVE_GIB says: files and recordings get 507, batches wait."
    return None


async def read_status(app: FastAPI) -> Status:
    """Read the whole state. What belongs to the event loop is read on it; processes and GPUs are at most 30 s old."""
    engine, drain, settings = app.state.engine, app.state.drain, app.state.settings
    loads, states = engine.loads(), engine.health()
    swaps, running, draining = engine.swaps, drain.running, drain.draining
    pids = {pid for load in loads for pid in load.pids}
    look: Callable[[], Awaitable[Inspection]] = partial(asyncio.to_thread, _inspect, loads)
    families, ram, hardware = await app.state.inspection.read(look, pids)
    gpus = [_gpu(gpu, families) for gpu in hardware.gpus]
    held = _Held(ram, _on_gpus_now(hardware.gpus, families))
    models = [_model(health, _load_of(health, loads), held, app.state.metrics.last_minute) for health in states]
    found = {model.status for model in models} | ({"draining"} if draining else set())
    paths = {name: getattr(settings, name) for name in Paths.model_fields}
    recent: LastMinute[Answered] = app.state.metrics.last_requests
    return Status(
        status=next((state for state in ("draining", "failed", "loading") if state in found), "ready"),
        degraded=degraded(app),
        version=_VERSION,
        pid=os.getpid(),
        base_url=app.state.base_url,
        started_at=iso(datetime.fromtimestamp(_STARTED_AT, UTC)) or "",
        uptime_seconds=round(time.time() - _STARTED_AT, 1),
        requests_running=running,
        swaps=swaps,
        ram_total_bytes=hardware.ram_bytes,
        ram_available_bytes=hardware.ram_available_bytes,
        models=models,
        gpus=gpus,
        no_gpus=hardware.problem,
        traces=app.state.tracing and app.state.tracing.collector,
        paths=Paths(**{name: path and str(path.absolute()) for name, path in paths.items()}),
        host=settings.host,
        reserve_bytes=reserve_bytes(settings),
        last_minute=LastMinuteRequests(seconds=round(recent.seconds, 1), **asdict(recent.of(""))),
        refused=app.state.lately.refused()[:_SHOWN],
        log=app.state.lately.log()[:_SHOWN],
    )


def answers(app: FastAPI) -> dict[Question, Callable[[], Awaitable[bytes]]]:
    """The answers of the socket, by question."""

    async def status() -> bytes:
        return (await read_status(app)).model_dump_json().encode()

    async def refusals() -> bytes:
        return Refusals(data=app.state.lately.refused()).model_dump_json().encode()

    return {"status": status, "refusals": refusals, "metrics": partial(read_page, app)}


def _inspect(loads: Iterable[ModelLoad]) -> Inspection:
    """Look at processes and GPUs. Blocks, for 50 to 150 ms."""
    families = {pid: engine.id for model in loads for engine in model.engines or (model,) for pid in engine.pids}
    ram: Counter[str] = Counter()
    for one in psutil.Process().children(recursive=True):  # parents before their children
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            engine = families.get(one.pid) or families.get(one.ppid())
            if engine is not None:
                families[one.pid] = engine
                ram[engine] += one.memory_full_info().uss
    return families, ram, read_hardware(os.getpid(), ram_ours=False)


def _gpu(gpu: Gpu, families: Mapping[int, str]) -> GpuState:
    return GpuState(
        index=gpu.index,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.total_bytes - gpu.free_bytes,
        others_bytes=gpu.foreign_bytes,
        holders=[
            GpuHolder(**asdict(one), model=model_of(families[one.pid]) if one.pid in families else None)
            for one in gpu.holders
        ],
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """What the processes of each engine have now, in bytes. None: the driver does not say."""

    ram: Mapping[str, int]
    gpus: Mapping[str, int | None]

    def by(self, engines: Collection[ModelLoad]) -> dict[str, int | None]:
        """Return `gpu_bytes` and `ram_bytes` of these together; None where nothing, or not all, is known."""
        ram = [self.ram[one.id] for one in engines if one.id in self.ram]
        gpus = [self.gpus[one.id] for one in engines if one.id in self.gpus]
        return {
            "gpu_bytes": sum(filter(None, gpus)) if gpus and None not in gpus else None,
            "ram_bytes": sum(ram) if ram else None,
        }


def _on_gpus_now(gpus: Iterable[Gpu], families: Mapping[int, str]) -> dict[str, int | None]:
    held: dict[str, int | None] = {}
    for one in (holder for gpu in gpus for holder in gpu.holders if holder.pid in families):
        engine = families[one.pid]
        before = held.get(engine, 0)
        held[engine] = None if one.used_bytes is None or before is None else before + one.used_bytes
    return held


def _memory(load: ModelLoad, held: _Held) -> Memory:
    engines = load.engines or (load,)
    planned = _sum(one.served.planned_bytes for one in engines if one.served)
    later = _sum(one.later_bytes for one in engines if one.later_bytes)
    return Memory(
        planned_gpu_bytes=_on_gpus(planned),
        planned_ram_bytes=planned.get(None),
        next_gpu_bytes=_on_gpus(later),
        next_ram_bytes=later.get(None),
        **held.by(engines),
    )


def _sum(several: Iterable[Mapping[int | None, int]]) -> Counter[int | None]:
    return sum((Counter(one) for one in several), Counter())


def _gpus(load: ModelLoad) -> list[int]:
    """Return the GPUs that a model is on, all of its engines together."""
    found = {place for one in load.engines or (load,) if one.served for place in one.served.planned_bytes}
    return sorted(place for place in found if place is not None)


def _load_of(health: ModelHealth, loads: Iterable[ModelLoad]) -> ModelLoad:
    return next((load for load in loads if load.id == health.id), ModelLoad(health.id, running=0, waiting=0))


def _engine(health: ModelHealth, load: ModelLoad, held: _Held) -> EngineState:
    return EngineState(
        id=health.id,
        status=health.status,
        phase=health.phase,
        restarts=health.restarts,
        gpus=_gpus(load),
        pids=list(load.pids),
        running=load.running,
        waiting=load.waiting,
        **held.by([load]),
    )


def _on_gpus(planned: Mapping[int | None, int]) -> int | None:
    return sum(size for place, size in planned.items() if place is not None) or None


def _model(health: ModelHealth, load: ModelLoad, held: _Held, recent: LastMinute[Usage]) -> ModelState:
    served, done, reason = load.served, recent.of(health.id), health.error or health.reason
    loaded = ServedWith(source=served.source, folder=served.folder, compiled=load.compiled) if served else None
    return ModelState(
        id=health.id,
        status=health.status,
        phase=health.phase,
        progress=health.progress,
        for_seconds=health.elapsed_seconds,
        remaining_seconds=health.remaining_seconds,
        reason=reason and reason.removeprefix(f"{health.id}: "),  # the model is shown in front of it
        restarts=health.restarts,
        served_with=loaded,
        gpus=_gpus(load),
        memory=_memory(load, held),
        pids=list(load.pids),
        running=load.running,
        waiting=health.waiting + load.waiting,
        kv_cache_usage=load.kv_cache_usage,
        last_minute=LastMinuteWork(
            seconds=round(recent.seconds, 1),
            answers=done.requests,
            errors=done.errors,
            tokens_per_second=round(done.completion_tokens / recent.seconds, 1),
            images=done.images,
            audio_seconds=round(done.audio_seconds, 1),
        ),
        engines=[_engine(one, _load_of(one, load.engines or (load,)), held) for one in health.engines],
    )


@contextlib.asynccontextmanager
async def status_socket(
    data_dir: Path, known: Mapping[Question, Callable[[], Awaitable[bytes]]]
) -> AsyncIterator[None]:
    """Answer each connection by the line that it sends. On a file system without sockets, only log a line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError, TimeoutError):  # it did not wait
            async with asyncio.timeout(_QUESTION_SECONDS):
                asked = (await reader.readline()).strip().decode()
            for question, read in known.items():
                if question == asked:
                    writer.write(await read())
            await writer.drain()

    path, server = data_dir / FILE, None
    try:
        server = await asyncio.start_unix_server(answer, sock=_bound(data_dir))
    except OSError as error:
        _log.warning("`hearth status` will get no answer: %s cannot be made (%s).", path, error.strerror)
    try:
        yield
    finally:
        if server is not None:
            server.close()
            path.unlink(missing_ok=True)


def _bound(data_dir: Path) -> socket.socket:
    (data_dir / FILE).unlink(missing_ok=True)  # a killed server's: we hold the directory's lock
    listener = socket.socket(socket.AF_UNIX)
    try:
        with near(data_dir) as address:
            listener.bind(address)
        (data_dir / FILE).chmod(0o600)  # before it listens, so that no other user ever gets in
    except OSError:
        listener.close()
        raise
    return listener


class Lately(logging.Handler):
    """Keeps the last 1,000 refusals and, as a log handler, the last 50 warnings and errors."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(logging.WARNING)
        self._metrics = metrics
        self._refused: deque[tuple[datetime, RequestRecord]] = deque(maxlen=_REFUSALS)
        self._lines: deque[LogLine] = deque(maxlen=_LINES)

    def refuse(self, record: RequestRecord) -> None:
        """Keep a request that has ended with an error."""
        self._refused.append((datetime.now(UTC), record))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line, not the record: its trace would keep the bodies of requests in memory."""
        at = iso(datetime.fromtimestamp(record.created, UTC)) or ""
        level = record.levelname.lower()
        self._lines.append(LogLine(at=at, level=level, source=record.name, message=record.getMessage()))

    def refused(self, since: datetime | None = None) -> list[Refusal]:
        """Return what was refused or failed, newest first."""
        return [self._refusal(at, record) for at, record in reversed(self._refused) if since is None or at >= since]

    def log(self) -> list[LogLine]:
        """Return warnings and errors, newest first."""
        return [*self._lines][::-1]  # a copy at once: threads log too

    def _refusal(self, at: datetime, record: RequestRecord) -> Refusal:
        return Refusal(
            at=iso(at) or "",
            request_id=record.request_id,
            key=record.key,
            method=record.method if record.method in METHODS else "",
            route=record.route,
            path=record.path,
            model=record.model if record.model in self._metrics.models else None,
            status=record.status,
            error_code=record.error_code or "",
            param=record.param,
        )

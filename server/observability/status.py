"""How the server stands, as `hearth status --json` and `GET /v1/admin/status` show it: models, memory, queues, GPUs.

`Status` is what they show, with sizes in bytes; `read_status` gathers it. `status_socket`, in the data directory and
for its owner alone, answers each connection with it, and `ask` is its other end: no key is needed for what the
directory's owner may know anyway, and it answers also while HTTP is closed to new work.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, ValidationError

from engine import ModelHealth, ModelLoad
from engine.placement.hardware import Gpu, Hardware, read_hardware
from server.observability.metrics import LastMinute
from server.observability.moments import iso
from server.terminal import HEARTH

FILE = "status.sock"
_log = logging.getLogger("hearth.status")


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
    degraded: str | None = None
    """What does not work although models answer; null: nothing of the kind."""
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


def degraded(app: FastAPI) -> str | None:
    """Say what a server cannot do that answers all the same; None: nothing of the kind. Open to everybody."""
    if app.state.database.failing is None:
        return None
    return "The key database fails: keys that were used lately go on working for a while, all others get 503."


async def read_status(app: FastAPI) -> Status:
    """Look at everything once. What belongs to the event loop is read on it, processes and GPUs in a thread (50 ms)."""
    engine, drain, settings = app.state.engine, app.state.drain, app.state.settings
    loads, states = {load.id: load for load in engine.loads()}, engine.health()
    swaps, running, draining = engine.swaps, drain.running, drain.draining
    families, ram, hardware = await asyncio.to_thread(_inspect, loads.values())
    gpus = [_gpu(gpu, families) for gpu in hardware.gpus]
    models = []
    for health in states:
        load = loads.get(health.id) or ModelLoad(health.id, running=0, waiting=0)
        models.append(_model(health, load, _memory(load, ram.get(load.id), gpus), app.state.metrics.last_minute))
    found = {model.status for model in models} | ({"draining"} if draining else set())
    paths = {name: getattr(settings, name) for name in Paths.model_fields}
    started_at = psutil.Process().create_time()
    return Status(
        status=next((state for state in ("draining", "failed", "loading") if state in found), "ready"),
        degraded=degraded(app),
        version=importlib.metadata.version("hearth-inference"),
        pid=os.getpid(),
        base_url=app.state.base_url,
        started_at=iso(datetime.fromtimestamp(started_at, UTC)) or "",
        uptime_seconds=round(time.time() - started_at, 1),
        requests_running=running,
        swaps=swaps,
        ram_total_bytes=hardware.ram_bytes,
        ram_available_bytes=hardware.ram_available_bytes,
        models=models,
        gpus=gpus,
        no_gpus=hardware.problem,
        paths=Paths(**{name: path and str(path.absolute()) for name, path in paths.items()}),
    )


def _inspect(loads: Iterable[ModelLoad]) -> tuple[dict[int, str], dict[str, int], Hardware]:
    """Return whose each process is, what the models' processes have in RAM, and the machine. Blocks."""
    families: dict[int, str] = {}
    ram: dict[str, int] = {}
    for load in loads:
        for pid in load.pids:
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                process = psutil.Process(pid)
                for one in (process, *process.children(recursive=True)):
                    families[one.pid] = load.id
                    with contextlib.suppress(psutil.Error):
                        ram[load.id] = ram.get(load.id, 0) + one.memory_full_info().uss
    return families, ram, read_hardware(server_pid=os.getpid())


def _gpu(gpu: Gpu, families: Mapping[int, str]) -> GpuState:
    return GpuState(
        index=gpu.index,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.total_bytes - gpu.free_bytes,
        others_bytes=gpu.foreign_bytes,
        holders=[GpuHolder(**asdict(one), model=families.get(one.pid)) for one in gpu.holders],
    )


def _memory(load: ModelLoad, ram_bytes: int | None, gpus: Sequence[GpuState]) -> Memory:
    planned, later = load.served.planned_bytes if load.served else {}, load.later_bytes or {}
    used_bytes = [one.used_bytes for gpu in gpus for one in gpu.holders if one.model == load.id]
    known = [used for used in used_bytes if used is not None]
    return Memory(
        planned_gpu_bytes=_on_gpus(planned),
        planned_ram_bytes=planned.get(None),
        next_gpu_bytes=_on_gpus(later),
        next_ram_bytes=later.get(None),
        gpu_bytes=sum(known) if known and len(known) == len(used_bytes) else None,
        ram_bytes=ram_bytes,
    )


def _on_gpus(planned: Mapping[int | None, int]) -> int | None:
    return sum(size for place, size in planned.items() if place is not None) or None


def _model(health: ModelHealth, load: ModelLoad, memory: Memory, recent: LastMinute) -> ModelState:
    served, done, reason = load.served, recent.of(health.id), health.error or health.reason
    loaded = ServedWith(source=served.source, folder=served.folder, compiled=load.compiled) if served else None
    return ModelState(
        id=health.id,
        status=health.status,
        phase=health.phase,
        progress=health.progress,
        for_seconds=health.elapsed_seconds,
        remaining_seconds=health.remaining_seconds,
        reason=reason and reason.removeprefix(f"{health.id}: "),  # the reader is told the model first
        restarts=health.restarts,
        served_with=loaded,
        gpus=[place for place in served.planned_bytes if place is not None] if served else [],
        memory=memory,
        pids=list(load.pids),
        running=load.running,
        waiting=health.waiting + load.waiting,
        last_minute=LastMinuteWork(
            seconds=round(recent.seconds, 1),
            tokens_per_second=round(done.completion_tokens / recent.seconds, 1),
            images=done.images,
            audio_seconds=round(done.audio_seconds, 1),
        ),
    )


class StatusError(Exception):
    """A server runs and does not answer; the message says what to do."""


@contextlib.asynccontextmanager
async def status_socket(data_dir: Path, read: Callable[[], Awaitable[Status]]) -> AsyncIterator[None]:
    """Answer who connects. A file system without sockets costs a log line: the server is there for others."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):  # it did not wait
            writer.write((await read()).model_dump_json().encode())
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


def ask(data_dir: Path, seconds: float) -> Status | None:
    """Return how the server of this directory stands, None if none listens there. Blocks.

    Raises `StatusError` when one is there and does not answer, or may not be asked.
    """
    try:
        with _near(data_dir) as address, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(address)
            with connection.makefile("rb") as stream:
                said = stream.read(2**24)
        return Status.model_validate_json(said)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return None
    except TimeoutError as error:
        raise StatusError(
            f"The server of {data_dir} has not answered for {seconds:.0f} s: its event loop does not move, or it is "
            "stopped. Its log may say why; restart it if it stays so."
        ) from error
    except PermissionError as error:
        raise StatusError(
            f"The data directory {data_dir} is not yours. Run this as the user that runs the server, like: "
            f"sudo -u hearth {HEARTH} ..."
        ) from error
    except (OSError, ValidationError) as error:
        raise StatusError(
            f"The server of {data_dir} says something else than expected. It is ending, or of another release: run "
            "the `hearth` that belongs to it, or restart it."
        ) from error


def _bound(data_dir: Path) -> socket.socket:
    (data_dir / FILE).unlink(missing_ok=True)  # of a server that was killed: we hold the directory's lock
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _near(data_dir) as address:
            listener.bind(address)
        (data_dir / FILE).chmod(0o600)  # before it listens, so that no other user ever gets in
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _near(data_dir: Path) -> Iterator[str]:
    """Name the socket by way of an open directory: an address has room for 107 bytes, a path may be longer."""
    folder = os.open(data_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{FILE}"
    finally:
        os.close(folder)

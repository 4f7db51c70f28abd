"""The server's state, as `hearth status --json` and `GET /v1/admin/status` show it: models, memory, queues, GPUs.

`Status` is what they show, with sizes in bytes. `ask` gets it from the server's socket (`status_server.py`), which is
in the data directory and open to its owner only. So it needs no key, and answers while HTTP takes no new requests.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from server.terminal import HEARTH

FILE = "status.sock"
ANSWER_SECONDS = 10.0
Question: TypeAlias = Literal["status", "refusals", "metrics"]
_T = TypeVar("_T")


class _Part(BaseModel):
    # Fields of another release's server are ignored
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ServedWith(_Part):
    """What a model was loaded with."""

    source: Literal["own", "variant", "shipped", "demo"]
    """own: the folder that models.yaml names. variant: what the plan chose. shipped: voices that come with Hearth.
    demo: a demo model."""
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
    """What its next load takes, on all of its GPUs together, if that differs from what it was loaded with."""
    next_ram_bytes: int | None = None
    gpu_bytes: int | None
    """What its processes hold on GPUs, by the driver."""
    ram_bytes: int | None
    """What only its processes use (USS): it would be free without them."""


class LastMinuteWork(_Part):
    """Of answers that ended in the last minute, or since the start if that is shorter."""

    seconds: float
    answers: int = 0
    """Each of a batch; with those that failed or were aborted."""
    errors: int = 0
    tokens_per_second: float
    images: int
    audio_seconds: float


class LastMinuteRequests(_Part):
    """HTTP requests that ended in the last minute, or since the start if that is shorter."""

    seconds: float
    requests: int
    refused: int
    """Answered with a 4xx."""
    failed: int
    """Answered with a 5xx, or cut off."""


class Refusal(_Part):
    """A request that was refused or failed. Of what its client wrote it has only `path`."""

    at: str
    request_id: str
    """`x-request-id`, by which the access log has more."""
    key: str | None
    """Public id."""
    method: str
    route: str | None
    path: str | None
    """Of a request without a route, or refused before one was found: escaped, cut, without keys."""
    model: str | None
    """null: none, or an unknown one."""
    status: int | None
    error_code: str
    param: str | None
    """The field, as far as its path has our own words; of a 429 the key's limit that was reached."""


class Refusals(_Part):
    """Newest first. A restart of the server empties it."""

    object: Literal["list"] = "list"
    data: list[Refusal]


class LogLine(_Part):
    """A warning or an error of the server's log. It may name files."""

    at: str
    level: str
    source: str
    message: str


class _Loaded(_Part):
    id: str
    """The first engine of a model has its name, further ones `name#2` and so on."""
    status: Literal["unloaded", "loading", "ready", "sleeping", "failed"]
    phase: str
    restarts: int
    """Deaths of its process since the start."""
    gpus: list[int]
    pids: list[int]
    running: int
    """Sequences, images or texts in progress."""
    waiting: int
    """Requests that wait for their turn, or for the model to be loaded."""


class EngineState(_Loaded):
    """One engine of a model with replicas."""

    gpu_bytes: int | None = None
    """What its processes hold on GPUs, by the driver."""
    ram_bytes: int | None = None
    """USS, as in `Memory`."""


class ModelState(_Loaded):
    """One model."""

    progress: float
    """Of a load, 0 to 1."""
    for_seconds: float
    """How long it has been in this state."""
    remaining_seconds: float | None = None
    """How long a load should still take, going by the last one of this model; null if not known."""
    reason: str | None
    """Why it is not ready; for the operator, it may name files."""
    served_with: ServedWith | None
    """null: it is not loaded."""
    memory: Memory
    kv_cache_usage: float | None = None
    """Share of its KV cache in use, 0 to 1; null: it has none, or `HEARTH_VLLM_METRICS` is off."""
    last_minute: LastMinuteWork
    engines: list[EngineState] = []
    """Of a model with replicas; the fields above count them together."""


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
    """What of it is not Hearth's."""
    holders: list[GpuHolder]


class Paths(_Part):
    """The paths of the server, so that a command can tell whether its own are the same."""

    data_dir: str
    weights_dir: str
    models: str
    tls_cert: str | None
    tls_key: str | None = None


class Status(_Part):
    """The server's state at one moment."""

    object: Literal["status"] = "status"
    status: Literal["ready", "loading", "failed", "draining"]
    """failed: at least one model has failed; the others may answer."""
    degraded: str | None = None
    """What does not work although models answer; null: nothing."""
    version: str
    pid: int
    base_url: str | None
    """For clients on this machine."""
    started_at: str
    uptime_seconds: float
    requests_running: int
    """HTTP requests that are being answered, one for this included."""
    last_minute: LastMinuteRequests
    swaps: int
    """How often a model has made room for another since the start."""
    ram_total_bytes: int
    ram_available_bytes: int
    models: list[ModelState]
    gpus: list[GpuState]
    no_gpus: str | None
    """Why GPUs could not be read."""
    traces: str | None = None
    """Host of the collector that gets a span of each request; null: tracing is off."""
    paths: Paths
    host: str
    """What it listens on."""
    reserve_bytes: int
    """What uploads leave free on the disk."""
    refused: list[Refusal] = []
    """The last five that were refused or failed, newest first."""
    log: list[LogLine] = []
    """The last five warnings and errors, newest first."""
    replicas: list[ReplicaStatus] = []
    """In a cluster, over HTTP: the state of each replica, with its own models only. The fields above are of the
    replica that answers."""
    machines: list[MachineState] = []
    """In a cluster, over HTTP: its machines, also those without a replica and dead ones."""


class ReplicaStatus(_Part):
    """One replica of a cluster."""

    node: str
    """Address of its machine."""
    role: str
    replica: str
    status: Status


class MachineState(_Part):
    """One machine of a cluster."""

    address: str
    node_id: str
    """Ray's id."""
    alive: bool
    head: bool
    """Whether it is the head of the cluster."""
    gpus: int
    cpus: int
    memory_bytes: int


class StatusError(Exception):
    """A server runs but does not answer; the message says what to do."""


def ask(data_dir: Path, seconds: float = ANSWER_SECONDS) -> Status | None:
    """Return the state of the server of this directory, None if none listens there. Blocks.

    Raises `StatusError` when one is there and does not answer, or may not be asked.
    """
    return _asked(data_dir, seconds, "status", Status.model_validate_json)


def ask_refusals(data_dir: Path) -> Refusals | None:
    """Return what the server has refused lately, like `ask`."""
    return _asked(data_dir, ANSWER_SECONDS, "refusals", Refusals.model_validate_json)


def ask_metrics(data_dir: Path) -> str | None:
    """Return the page of `/metrics`, like `ask`."""
    return _asked(data_dir, ANSWER_SECONDS, "metrics", bytes.decode)


def _asked(data_dir: Path, seconds: float, what: Question, read: Callable[[bytes], _T]) -> _T | None:
    try:
        with near(data_dir) as address, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(address)
            connection.sendall(f"{what}\n".encode())
            with connection.makefile("rb") as stream:
                said = stream.read(2**24)
        return read(said)
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
    except (OSError, ValueError) as error:
        raise StatusError(
            f"The server of {data_dir} gave an unexpected answer. It is ending, or of another release: run "
            "the `hearth` that belongs to it, or restart it."
        ) from error


@contextlib.contextmanager
def near(data_dir: Path) -> Iterator[str]:
    """Return the socket's path through an open directory: an address has room for 107 bytes, a path may be longer."""
    folder = os.open(data_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{FILE}"
    finally:
        os.close(folder)

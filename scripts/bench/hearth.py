"""What is measured: a temporary folder with a models.yaml of its own, and a real `hearth serve` on it with a key."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from bench.figures import say
from bench.processes import BenchError, Child, end, tail

from engine import ConfigError, load_config

TIER = "bench"
START_SECONDS = 900.0  # a large model is read from a slow disk
_SCRIPTS = Path(__file__).parents[1]
_SCOPES = ("chat", "batch", "images")
_POLL_SECONDS = 0.2
S = TypeVar("S", bound="Server")


@dataclass(frozen=True, slots=True)
class Workspace:
    """A temporary folder with the server's data directory, its models.yaml and all logs."""

    folder: Path
    model: str
    weights_dir: Path
    environment: dict[str, str]
    checkout: Path | None = None
    """Another checkout of Hearth, whose server is started; its own `.venv` belongs to it."""

    @property
    def models(self) -> Path:
        """The models.yaml."""
        return self.folder / "models.yaml"

    @property
    def hearth(self) -> str:
        """The command line."""
        folder = Path(sys.executable).parent if self.checkout is None else self.checkout / ".venv" / "bin"
        return str(folder / "hearth")

    def log(self, name: str) -> Path:
        """Return the file that the process `name` prints to."""
        return self.folder / f"{name}.log"


@contextmanager
def open_workspace(  # noqa: PLR0913  # most are rare
    models: Path,
    model: str,
    weights_dir: Path | None,
    *,
    engine: dict[str, Any] | None = None,
    beside: Sequence[str] = (),
    checkout: Path | None = None,
) -> Iterator[Workspace]:
    """Set up for one model of `models`, with the settings of `engine` above its own. Raises `BenchError`.

    `model` may also be a folder of weights: it is served in place of the first chat model. Without `weights_dir` there
    are no weights, and demo models answer. The models named in `beside` are served too. No limit of a tier applies.
    """
    entries = _entries(models if checkout is None else checkout / "models.yaml")
    if Path(model).is_dir():
        weights_dir, weights = Path(model).resolve().parent, Path(model).resolve().name
        model = next(name for name, entry in entries.items() if entry["task"] == "chat")
        entries[model]["weights"] = weights
        for key in ("demo", "variants"):
            entries[model].pop(key, None)
    for name in (model, *beside):
        if name not in entries:
            raise BenchError(f"{models} has no model {name!r}, only: {', '.join(entries)}. Choose one with --model.")
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as name:
        folder = Path(name)
        served = {one: entries[one] | {"tier": TIER} for one in (model, *beside)}
        served[model]["engine"] = (served[model].get("engine") or {}) | (engine or {})
        document = {"models": served, "tiers": {TIER: {"models": [TIER]}}}
        (folder / "models.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        weights_dir = folder / "weights" if weights_dir is None else weights_dir.resolve()
        place = Workspace(folder, model, weights_dir, _environment(folder, weights_dir), checkout)
        if checkout is None:
            _check(place)
        elif not Path(place.hearth).is_file():
            raise BenchError(f"There is no {place.hearth}. Run scripts/setup in that checkout.")
        yield place


def model_names(models: Path) -> list[str]:
    """Return the names of all models of a models.yaml. Raises `BenchError`."""
    return [*_entries(models)]


def _entries(models: Path) -> dict[str, Any]:
    try:
        return dict(yaml.safe_load(models.read_text(encoding="utf-8"))["models"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BenchError(f"{models} cannot be read: {error}") from error


def _check(place: Workspace) -> None:
    try:
        load_config(place.models)
    except ConfigError as error:
        raise BenchError(str(error)) from error


def _environment(folder: Path, weights_dir: Path) -> dict[str, str]:
    """Leave out the settings of a server that may run here, and give every process one OpenMP thread by default."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    inherited.pop("PYTHONPATH", None)
    return {
        "OMP_NUM_THREADS": "1",
        **inherited,
        "HEARTH_DATA_DIR": str(folder / "data"),
        "HEARTH_WEIGHTS_DIR": str(weights_dir),
        "HEARTH_MODELS": str(folder / "models.yaml"),
    }


class Server:
    """A server process that listens at `host` and `port`, or will."""

    host = "127.0.0.1"
    health = "/health"

    def __init__(self, process: asyncio.subprocess.Process, port: int, key: str, log: Path) -> None:
        self._process = process
        self.port = port
        self.key = key
        self.log = log

    @property
    def pid(self) -> int:
        """The process that was started; everything else is below it."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self._process.returncode is not None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET; status 0 while nothing listens."""
        return await asyncio.to_thread(_get, self.host, self.port, path)

    async def is_ready(self) -> bool:
        """Whether its models are loaded. Raises `BenchError` if one cannot be."""
        return (await self.get(self.health))[0] == 200

    async def ready(self) -> None:
        """Wait until it is. Raises `BenchError` if the server ends, cannot load, or takes too long, and stops it."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self.is_ready():
                    if self.ended:
                        raise BenchError(f"The server ended by itself.{tail(self.log)}")  # noqa: TRY301
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            await self.stop()
            raise BenchError(f"The server was not ready after {START_SECONDS:.0f} s.{tail(self.log)}") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Terminate it."""
        await end(self._process)


class HearthServer(Server):
    """`hearth serve`."""

    health = "/health/ready"

    @classmethod
    async def launch(cls, place: Workspace, key: str | None = None, name: str = "hearth") -> HearthServer:
        """Start it with a new key, or with `key` of an earlier start, and return at once. Raises `BenchError`."""
        key, port, log = key or await create_key(place), free_port(), place.log(name)
        arguments = (place.hearth, "serve", "--port", str(port))
        return cls(await spawn(arguments, place.environment, log, cwd=place.checkout), port, key, log)

    async def is_ready(self) -> bool:
        states = await self.states()
        if "failed" in states.values():
            raise BenchError(f"The server cannot load its models.{tail(self.log)}")
        status, _ = await self.get(self.health)
        return status == 200 and bool(states)

    async def states(self) -> dict[str, str]:
        """Return the state of each model, nothing while nothing listens."""
        _, body = await self.get(self.health)
        found = msgspec.json.decode(body).get("models", {}) if body else {}
        return {name: model["status"] for name, model in found.items()}


async def create_key(place: Workspace, name: str = "bench") -> str:
    """Make a key of the workspace's tier with the real command line. Raises `BenchError`."""
    scopes = [word for scope in _SCOPES for word in ("--scope", scope)]
    process = await asyncio.create_subprocess_exec(
        *(place.hearth, "keys", "create", "--name", name, "--tier", TIER, *scopes, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=place.environment,
        cwd=place.checkout,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise BenchError(f"No key could be made: {errors.decode(errors='replace').strip()}")
    key: str = msgspec.json.decode(output)["key"]
    return key


@asynccontextmanager
async def running(*starting: Coroutine[Any, Any, S]) -> AsyncIterator[list[S]]:
    """Launch servers together, wait until all are ready, and stop them in the end. Raises `BenchError`."""
    tasks = [asyncio.create_task(one) for one in starting]
    try:
        servers = await asyncio.gather(*tasks)
        say("Loading the models.")
        await asyncio.gather(*(server.ready() for server in servers))
        yield servers
    finally:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in outcomes if not isinstance(server, BaseException)))


@asynccontextmanager
async def load_generator(place: Workspace, *arguments: str) -> AsyncIterator[Child]:
    """Start a process that does the jobs of bench/load.py, and stop it in the end."""
    environment = place.environment | {"PYTHONPATH": str(_SCRIPTS)}
    child = await Child.start("bench.load", *arguments, environment=environment, log=place.log("load"))
    try:
        yield child
    finally:
        await child.stop()


async def spawn(
    arguments: Sequence[str], environment: dict[str, str], log: Path, cwd: Path | None = None
) -> asyncio.subprocess.Process:
    """Start a server process that prints to `log`."""
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=cwd,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
        )


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    return 0, b""

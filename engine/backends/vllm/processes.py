"""vLLM's processes: how they are started, watched and ended. On a CPU a fork server that has imported vLLM makes them.

vLLM changes `os.environ` whenever it builds a configuration: that happens under `CONFIG_LOCK`, one engine at a time.
"""

import asyncio
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import queue
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import psutil

from engine.backends.vllm import compat
from engine.errors import LoadError, StartError
from engine.placement.hardware import MODEL_VICTIM, offer_to_oom_killer
from engine.process.child import end_with_starter
from engine.process.watchdog import Guard, Patience

_T = TypeVar("_T")
Started: TypeAlias = Callable[[BaseProcess], None]

_log = logging.getLogger("hearth.vllm")

CONFIG_LOCK = threading.Lock()
_fork_lock = threading.Lock()
_settings_lock = threading.Lock()
_LONGEST_CAUSE = 300  # characters
_FIRST_WORDS = 160  # of these, which say the cause; advice follows
_OF_CONFIGURATION = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError),
    *(TypeError, ValueError),
)
# Errors of those kinds that may pass; a KV cache that is too small for one conversation does not.
_PASSING = re.compile(r"(?i)memory|cuda|nccl|device|driver|time[d ]*out|connect|address|initialization failed")
_NO_ROOM = re.compile(r"max seq len|No available memory for the cache")
_PYDANTIC = re.compile(r"^\d+ validation errors? for \w+ (?:Value error, )?| \[type=\w+,.*$")
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+([^\s/'\"]*)")
_phases: Connection | None = None  # of an engine's process: where it says what it does
_fork_server_pid: int | None = None  # in the fork server and in the engines that it has forked
_starts: list[None] = []  # one for each engine that is starting at this moment, on any thread
# vLLM closes its sockets on the event loop, sometimes through a thread of its own.
_CLOSING_SECONDS = 30.0
_POLL_SECONDS = 0.02
# vLLM's thread that watches processes checks every second whether to end, and uses their descriptors until then.
_WATCHED_SECONDS = 2.0

# oneDNN caches 0.35 MiB and more for every size of a step, by default 1024, which was half a GiB; 32 are as fast.
FORK_SERVER_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}

# On a CPU torch compiles single functions on first use (like logprobs), with a C++ compiler: that blocks all requests
# for 10 s, and kills the engine if there is no compiler. Whole models: see plugin.py.
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # kept in /tmp, where others could have been first
    # vLLM sets it while the first engine starts. Compiled code is found by it, so each fork server must have it.
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
}

_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights come from folders, never from a hub at run time
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # set it to INFO to see what vLLM does
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for what a command answers
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",  # of the engine processes: libraries' deprecations
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": "5",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Outputs of a step that are handled at once, while other requests wait: 128, the default, take milliseconds.
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "16",
}

# FlashInfer and DeepGEMM compile with nvcc at first use. Set-up does not install it, but vLLM (0.32) uses them for
# sampling and FP8: no model would load.
_GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return any(importlib.metadata.distributions(name="vllm-cpu"))


def engine_environment() -> dict[str, str]:
    """Return the environment variables of engines; variables that are set already win."""
    return _ENGINE_ENVIRONMENT if runs_on_cpu() else _ENGINE_ENVIRONMENT | _GPU_ENVIRONMENT


def versions() -> str:
    """Name what compiled code depends on: vLLM, torch, and the features of the CPU."""
    packages = ("vllm-cpu" if runs_on_cpu() else "vllm", "torch")
    names = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    processors = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    abilities = re.search(r"^(?:flags|Features)\s*:(.*)$", processors, re.MULTILINE)
    known = hashlib.sha256(abilities[1].encode() if abilities else b"").hexdigest()
    return ", ".join([*names, f"processor {known[:12]}"])


def prepare(cpu_threads: int) -> None:
    """Set the environment of all engines and, on a CPU, start the fork server. Once, before any load."""
    for name, value in engine_environment().items():
        os.environ.setdefault(name, value)
    # With it each of vLLM's processes would send spans of its own.
    os.environ.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)
    os.environ["VLLM_RPC_BASE_PATH"] = str(_make_socket_folder())
    if not runs_on_cpu():
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads))
    os.environ.update(_CPU_ENVIRONMENT)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_torch_cache())
    # Until vLLM has set up its own loggers, it uses ours.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    start_fork_server()


def _torch_cache() -> Path:
    """Return where torch keeps code: a folder of our own user, unlike torch's default; else a temporary one."""
    # As vLLM finds its cache; without `pathlib`, which needs a home directory.
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    cache = os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or Path(users, "vllm"))  # noqa: PTH111
    folder = Path(cache, "torchinductor")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        problem = "it is not ours to write to"
    except OSError as error:
        problem = error.strerror or "it cannot be created"
    _log.warning(
        "vLLM's cache %s cannot be used (%s): models run uncompiled, and each start takes longer. Set VLLM_CACHE_ROOT "
        "to a folder of the server's user.",
        *(folder.parent, problem),
    )
    return Path(os.environ["VLLM_RPC_BASE_PATH"], "torchinductor")


def clean_up() -> None:
    """Remove what `prepare` made. Once, after the last engine has ended."""
    shutil.rmtree(os.environ.pop("VLLM_RPC_BASE_PATH"), ignore_errors=True)


def _make_socket_folder() -> Path:
    """Make a folder for vLLM's sockets that only our user can enter; vLLM would leave them open in /tmp, forever."""
    # Those of servers that were killed are removed
    for left in Path(tempfile.gettempdir()).glob("hearth-*-*"):
        pid = left.name.split("-")[1]
        if left.is_dir() and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"hearth-{os.getpid()}-"))


def start_own_processes() -> None:
    """Have vLLM start its engine processes by `process_context`. It has no setting for that (0.32)."""
    if not compat.fits("processes"):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # vLLM's own way would fork a server with threads
        return
    import vllm.v1.engine.utils as launcher

    launcher.get_mp_context = process_context


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs, for the whole process: one block at a time."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.update(before)
        for name in variables.keys() - before.keys():
            del os.environ[name]


@contextmanager
def changing_environment() -> Iterator[None]:
    """An engine starts in the block: then vLLM changes `os.environ`, and reads it.

    At all other times vLLM's settings are cached. It would look them up in `os.environ` many times per request and
    token, for about a fifteenth of the process's CPU time.
    """
    if not compat.fits("settings"):
        yield
        return
    import vllm.envs

    with _settings_lock:
        _starts.append(None)
        vllm.envs.disable_envs_cache()
    try:
        yield
    finally:
        with _settings_lock:
            _starts.pop()
            if not _starts:
                vllm.envs.enable_envs_cache()


def process_context() -> Any:
    """Return the context of processes that end with the server. Start them on a `StarterThread`."""
    context: Any = ForkServerContext() if runs_on_cpu() else SpawnContext()
    context.Process = _ForkedEngine if runs_on_cpu() else _SpawnedEngine
    return context


class _Job(threading.local):
    """What a starter thread runs. `on_start` is called with each process that it starts."""

    on_start: Started | None = None
    may_compile = True
    """False: an engine without kept code fails."""
    failure: Path | None = None
    """Where a started process writes the exception that ended it."""
    phases: Connection | None = None
    """Where it sends its phases (`tell_phase`)."""


job = _Job()


class _Tied:
    """Mixed in before a process class: the process ends with the server, and `job.on_start` is called with it."""

    def start(self) -> None:
        self.may_compile, self.failure, self.phases = job.may_compile, job.failure, job.phases
        super().start()  # type: ignore[misc]
        if job.on_start is not None:
            job.on_start(cast("BaseProcess", self))

    def run(self) -> None:
        global _phases  # noqa: PLW0603  # of a process
        _phases = self.phases
        # Not in the plugin: before vLLM loads that, it may wait minutes for a server that has ended.
        tie_to_parent()
        if not self.may_compile:
            os.environ["VLLM_FORCE_AOT_LOAD"] = "1"
        try:
            super().run()  # type: ignore[misc]
        except Exception as error:
            if self.failure is not None:
                with contextlib.suppress(OSError):
                    self.failure.write_bytes(msgspec.json.encode(cause_of(error)))
            raise


@contextmanager
def phases_shown(report: Callable[[str, float], None]) -> Iterator[None]:
    """Pass what processes started in the block send with `tell_phase` to `report`, on another thread."""
    receiving, job.phases = multiprocessing.Pipe(duplex=False)

    def pass_on() -> None:
        with receiving, contextlib.suppress(EOFError, OSError):
            while True:
                report(*receiving.recv())

    threading.Thread(target=pass_on, name="phases", daemon=True).start()
    try:
        yield
    finally:
        job.phases.close()
        job.phases = None


def tell_phase(phase: str, progress: float) -> None:
    """In the process of a starting engine: have the server show its phase."""
    if _phases is not None:
        with contextlib.suppress(OSError):
            _phases.send((phase, progress))


def end_phases() -> None:
    """The engine has started: no more phases are sent."""
    if _phases is not None:
        _phases.close()


class Cause(msgspec.Struct, frozen=True):
    """Why an engine did not start, in one line. `is_certain`: it would fail the next time too."""

    line: str
    is_certain: bool


def cause_of(error: Exception) -> Cause:
    """Return the last line of a vLLM exception, without paths of this machine."""
    text = _PYDANTIC.sub("", " ".join(str(error).split()))
    text = _PATH.sub(r"\1", text)
    name = type(error).__name__  # errors of huggingface_hub's strict configurations share no base with others
    kind = isinstance(error, _OF_CONFIGURATION) or type(error) is RuntimeError or name.endswith("ValidationError")
    certain = kind and (_NO_ROOM.search(text) is not None or _PASSING.search(text[:_FIRST_WORDS]) is None)
    line = f"{name}: {text}" if text else name
    return Cause(line if len(line) <= _LONGEST_CAUSE else f"{line[:_LONGEST_CAUSE]} ...", certain)


@contextmanager
def causes_told(model: str, *, may_be_the_code: bool) -> Iterator[None]:
    """Raise an error in the block as `LoadError` if it will recur, else as `StartError`, with its root cause.

    vLLM's own error only refers to what its process has printed. `may_be_the_code`: compiled code is loaded, without
    which the model may start, so no error is certain to recur.
    """
    job.failure = Path(os.environ["VLLM_RPC_BASE_PATH"], f"cause-{secrets.token_hex(8)}")
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        cause = cause_of(error)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            cause = msgspec.json.decode(job.failure.read_bytes(), type=Cause)
        if cause.is_certain and not may_be_the_code:
            advice = "docs/own-models.md, 'When it does not load', says what to do."
            raise LoadError(f"{model}: {cause.line} ({advice})") from error
        raise StartError(cause.line) from error
    finally:
        job.failure.unlink(missing_ok=True)
        job.failure = None


class _ForkedEngine(_Tied, ForkServerProcess):
    def start(self) -> None:
        ensure_fork_server_runs()
        super().start()


class _SpawnedEngine(_Tied, SpawnProcess):
    pass


class StarterThread:
    """Runs blocking starts one after the other on a thread that lives as long as the server.

    Not a pool's thread: the kernel kills a child when the *thread* that started it ends (`tie_to_parent`). Engines that
    share a device share one of these.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], Started | None]] = queue.SimpleQueue()
        # A daemon: a start that hangs must not keep the server from ending.
        threading.Thread(target=self._work, name=f"starter-{name}", daemon=True).start()

    async def run(self, work: Callable[[], _T], started: Started | None = None) -> _T:
        """Do `work` on the thread; return or raise its outcome. Cancelling stops the wait, not the work.

        `started` is called, on the thread, with each process of ours (`process_context`) that the work starts.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._jobs.put((future, work, started))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, work, job.on_start = self._jobs.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # raised in `run`
                future.set_exception(error)


class EngineWatch:
    """Watches the processes of one engine, from before its start to its end. On the event loop, but for `started`."""

    def __init__(self, model: str, patience: Patience | None) -> None:
        self._model = model
        self._processes: list[BaseProcess] = []
        self._sentinels: list[int] = []
        self._call: Callable[[], None] = self.end
        self.ended = False
        self.guard = Guard(patience, self.pids, self._on_hang)
        self.guard.watch()

    def started(self, process: BaseProcess) -> None:
        """Watch a process that is loading. From any thread."""
        self._processes.append(process)
        if self.ended:
            process.kill()

    def on_exit(self, call: Callable[[], None]) -> None:
        """Call `call` once, when a process exits, or hangs and was killed for that."""
        self._call = call
        loop = asyncio.get_running_loop()
        for process in self._processes:
            sentinel = os.dup(process.sentinel)  # vLLM closes its own while we still watch
            self._sentinels.append(sentinel)
            loop.add_reader(sentinel, self._exited)

    def end(self) -> None:
        """Watch no more. Safe to call twice."""
        self.ended = True
        self.guard.end()
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels.clear()

    def kill(self) -> None:
        self.guard.end()
        for process in self._processes:
            with contextlib.suppress(ValueError):  # already closed
                process.kill()

    def pids(self) -> list[int]:
        """Return the ids of its processes, without their children."""
        found = []
        for process in list(self._processes):
            with contextlib.suppress(ValueError):  # it has ended, and is closed
                found += [process.pid] if process.pid else []
        return found

    def _on_hang(self, how: str) -> None:
        _log.error("%s: its engine process does not respond and is killed: %s.", self._model, how)
        self.kill()
        self._exited()  # not left to the kernel: if its driver hangs, a process does not even die of a kill

    def _exited(self) -> None:
        self.end()
        self._call()


def end_engine(engine: Any, timeout_seconds: float) -> None:
    """Blocking. End the processes within that time; what the client of an `AsyncLLM` has open is closed soon after.

    vLLM leaves its ZeroMQ context and its processes' pipes to the garbage collector, but those of the first engine are
    frozen (server/serve.py).
    """
    engine.shutdown(timeout=timeout_seconds)
    with compat.guarded("end"):
        resources = engine.engine_core.resources
        # By their ending: names differ between releases of vLLM.
        sockets = [each for name, each in vars(resources).items() if name.endswith("_socket") and each is not None]
        close = partial(_close, resources.ctx, sockets, processes_of(engine))
        # A daemon that is not joined: ZeroMQ waits forever while a socket is open, and the event loop closes them.
        threading.Thread(target=close, name="vllm-end", daemon=True).start()


def processes_of(engine: Any) -> list[BaseProcess]:
    with compat.guarded("end"):
        manager = engine.engine_core.resources.engine_manager
        return [] if manager is None else list(manager.processes)
    return []


def _close(context: Any, sockets: list[Any], children: Iterable[BaseProcess]) -> None:
    time.sleep(_WATCHED_SECONDS)
    for process in children:
        with contextlib.suppress(ValueError):  # it still runs, or vLLM has closed it
            process.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    while not all(socket.closed for socket in sockets):
        if time.monotonic() > deadline:
            return  # left to the garbage collector, like vLLM does
        time.sleep(_POLL_SECONDS)
    context.destroy(linger=0)


def tie_to_parent() -> None:
    """Make this process end with the server, however the server ends. Safe to call twice."""
    with compat.guarded("fork server"):
        # Python gives every child our end of the pipe by which the fork server notices that the server has ended. If it
        # stays open, fork server and engine keep each other alive.
        server: Any = forkserver._forkserver  # noqa: SLF001  # not offered in public
        if server._forkserver_alive_fd is not None:  # noqa: SLF001
            os.close(server._forkserver_alive_fd)  # noqa: SLF001
            server._forkserver_alive_fd = None  # noqa: SLF001
    end_with_starter()
    parent = multiprocessing.parent_process()
    # While the kernel frees a killed server's memory, its children still see it alive: the fork server ends first.
    if parent is None or not parent.is_alive() or os.getppid() not in {parent.pid, _fork_server_pid}:
        os._exit(1)  # it died between our fork and the line above
    offer_to_oom_killer(MODEL_VICTIM)
    # Ctrl-C in a terminal goes to the whole process group. The server drains first, then ends its engines.
    os.setpgid(0, 0)


def become_fork_server() -> None:
    """In the fork server, before it forks: it ends with the server, and its children know it by its process id."""
    global _fork_server_pid  # noqa: PLW0603  # of a process, and inherited by its children
    _fork_server_pid = os.getpid()
    # It would notice the server's end itself, but then take seconds to free what it has imported.
    end_with_starter()
    # Only the server acts on SIGTERM and Ctrl-C for its process group: it drains first.
    os.setpgid(0, 0)


def start_fork_server() -> None:
    """Start it. It imports vLLM in its own process, so this returns at once."""
    multiprocessing.set_forkserver_preload(["engine.backends.vllm.preload"])
    own = {"LD_PRELOAD": ":".join(_preloaded_libraries())}
    own |= {name: value for name, value in FORK_SERVER_ENVIRONMENT.items() if name not in os.environ}
    with with_variables(own):
        forkserver.ensure_running()


def ensure_fork_server_runs() -> None:
    """Before each process is forked: start it again if it has died, continue it if it was stopped.

    Python would start another one by itself, but without the preloaded libraries. The engines of the dead one have
    ended with it: the kernel kills children that are tied to their parent.
    """
    with _fork_lock, compat.guarded("fork server"):
        server: Any = forkserver._forkserver  # noqa: SLF001  # not offered in public
        pid: int | None = server._forkserver_pid  # noqa: SLF001
        state = None
        with contextlib.suppress(psutil.Error):
            state = pid and psutil.Process(pid).status()
        if pid is not None and state == psutil.STATUS_STOPPED:
            _log.warning("Process %d, which engines are forked from, was stopped and is continued.", pid)
            os.kill(pid, signal.SIGCONT)
        elif state in {None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            if pid is not None:
                _log.warning("Process %d, which engines are forked from, has died; a new one is started.", pid)
            start_fork_server()


def _preloaded_libraries() -> list[str]:
    """Return what vLLM's CPU platform puts into LD_PRELOAD of its processes: PyTorch's libgomp and tcmalloc."""
    found = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    for package, pattern in (
        ("vllm", "libs/libtcmalloc_minimal*.so*"),
        ("torch", "lib/libgomp*.so*"),
        ("torch", "../torch.libs/libgomp*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += [str(path.resolve()) for path in sorted(Path(spec.origin).parent.glob(pattern))[:1]]
    return list(dict.fromkeys(found))  # vLLM may have put them there since

"""A real `vllm serve` for the benchmarks, with the engine settings of Hearth's engine and either of its front ends."""

from __future__ import annotations

import asyncio
import http.client
import importlib.metadata
import json
import os
import re
import socket
import sys
from typing import TYPE_CHECKING, Any, cast

from benchmarks.children import end, tail
from benchmarks.errors import BenchError
from benchmarks.rust_frontend import vllm_version
from engine import load_config
from engine.backends import vllm_fork_server, vllm_launch, vllm_start
from engine.backends.vllm_parsers import parsers_for
from engine.config import ChatModelSpec
from engine.pool.loader import Planned, hardware_for

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.workplace import Workplace

_POLL_SECONDS = 0.05
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
# It ends over these (0.32). Ours has nothing to set them for: without pictures there is nothing to cache.
_REFUSED_BY_RUST = frozenset({"mm_processor_cache_gb"})
_WITHOUT_EFFECT = re.compile(r"argument '(\w+)' currently has no effect")
_REFUSED = re.compile(r"^- (\w+)$", re.MULTILINE)
_UNEQUAL = (
    "Hearth checks a key, counts its usage and keeps turns; vllm serve is asked without a key",
    "Hearth's engine is forked from a process that has its imports, vllm serve's is started anew",
    "Hearth compiles schemas in a process of its own",
    "where models are compiled, vllm serve also compiles single functions at their first use; Hearth never does",
)
_ITS_OWN_ENGINE = (
    "vllm serve's engine is vLLM's as it is installed; Hearth's plugin looks for garbage less often in its own, spares "
    "searches for memory and, uncompiled on a CPU, has norms computed by one kernel each (--plugin gives both the same)"
)
_PLUGINS = "vllm.general_plugins"


class VllmServer:
    """A running `vllm serve` whose model is ready. It takes any key."""

    key = "none"
    host = "127.0.0.1"

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path, *, rust: bool, plugin: bool) -> None:
        self._process = process
        self.port = port
        self._log = log
        self._rust = rust
        self._plugin = plugin

    @property
    def pid(self) -> int:
        """The process that was started; in the Rust front end's case it only looks after it and the engine."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.returncode is not None

    @classmethod
    async def launch(cls, place: Workplace, *, rust: Path | None, name: str) -> VllmServer:
        """Start it, with the front end `rust` or else vLLM's own in Python, and return at once."""
        port, log = free_port(), place.log(name)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *_VLLM,
                *serve_arguments(place, rust=rust is not None),
                *("--host", cls.host, "--port", str(port)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(place, rust),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
            )
        return cls(process, port, log, rust=rust is not None, plugin=place.plugin)

    @classmethod
    async def start(cls, place: Workplace, *, rust: Path | None, name: str, within_seconds: float) -> VllmServer:
        """Start it and wait until the model is ready. Raises `BenchError`."""
        server = await cls.launch(place, rust=rust, name=name)
        try:
            async with asyncio.timeout(within_seconds):
                await server.ready()
        except TimeoutError:
            await server.stop()
            raise BenchError(f"vllm serve was not ready after {within_seconds:.0f} s.{tail(place.log(name))}") from None
        except BaseException:
            await server.stop()
            raise
        return server

    async def ready(self) -> None:
        """Wait for it. Raises `BenchError` if it ends instead."""
        while self._process.returncode is None:
            if await asyncio.to_thread(status_of, self.host, self.port, "/health") == 200:
                return
            await asyncio.sleep(_POLL_SECONDS)
        refused = ", ".join(_REFUSED.findall(self._log.read_text(errors="replace")))
        why = f" The Rust front end does not take {refused}." if self._rust and refused else ""
        raise BenchError(f"vllm serve ended by itself.{why}{tail(self._log)}")

    def unequal(self) -> list[str]:
        """Say what of it differs from Hearth."""
        unequal = [*_UNEQUAL] if self._plugin else [*_UNEQUAL, _ITS_OWN_ENGINE]
        if not self._rust:
            return unequal
        ignored = _WITHOUT_EFFECT.findall(self._log.read_text(errors="replace"))
        left_out = [f"the Rust front end does not take {name}" for name in sorted(_REFUSED_BY_RUST)]
        return [*unequal, *left_out, *(f"the Rust front end ignores {name}" for name in dict.fromkeys(ignored))]

    async def stop(self) -> None:
        """End it."""
        await end(self._process)


def serve_arguments(place: Workplace, *, rust: bool) -> list[str]:
    """Return the command line that gives `vllm serve` the model and the settings of Hearth's engine."""
    spec, folder, is_demo = _planned(place)
    nobody = cast("Any", None)  # its processes are not ours to start
    launch = vllm_start.Launch(spec, folder, is_demo, nobody, nobody, nobody, nobody, compiled=_is_compiled(spec))
    arguments = vllm_start._engine_arguments(launch)  # noqa: SLF001  # so that they cannot drift apart
    if not place.plugin:
        arguments.pop("ir_op_priority", None)  # kernels that the plugin brings
    if rust:
        arguments = {name: value for name, value in arguments.items() if name not in _REFUSED_BY_RUST}
    return [arguments.pop("model"), *_flags(arguments), *_parsers(spec, folder)]


def _planned(place: Workplace) -> tuple[ChatModelSpec, Path, bool]:
    config = load_config(place.models)
    spec = config.models[place.spec.id]
    if not isinstance(spec, ChatModelSpec):
        raise BenchError(f"{spec.id} is no chat model. Choose one with --model.")
    hardware = hardware_for(on_cpu=vllm_launch.runs_on_cpu(), ram_gib=None)
    planned = Planned(config, place.weights_dir, None, hardware)
    folder, is_demo = planned.folder(spec)
    return planned.chat_spec(spec, is_demo=is_demo), folder, is_demo


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, list):
            flags += [option, *map(str, value)]
        elif value is not None:
            flags += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _parsers(spec: ChatModelSpec, folder: Path) -> list[str]:
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    template = folder / "chat_template.jinja"
    if not template.is_file():
        template = folder / "tokenizer_config.json"
    text = template.read_text(encoding="utf-8") if template.is_file() else ""
    tools, reasoning = parsers_for(model_type, text, spec)
    flags = [] if tools is None else ["--enable-auto-tool-choice", "--tool-call-parser", tools]
    return flags + ([] if reasoning is None else ["--reasoning-parser", reasoning])


def _is_compiled(spec: Any) -> bool:
    """As Hearth starts it where it has compiled nothing before."""
    asked = spec.engine.enforce_eager
    return not asked if asked is not None else not vllm_launch.runs_on_cpu()


def _environment(place: Workplace, rust: Path | None) -> dict[str, str]:
    environment = vllm_launch._ENVIRONMENT | place.environment  # noqa: SLF001  # those of Hearth's engine
    if not place.plugin:
        plugins = {one.name for one in importlib.metadata.entry_points(group=_PLUGINS)} - {"hearth"}
        environment["VLLM_PLUGINS"] = ",".join(sorted(plugins))
    if vllm_launch.runs_on_cpu():
        environment = vllm_fork_server.ENVIRONMENT | environment | vllm_launch._CPU_ENVIRONMENT  # noqa: SLF001
        if _is_compiled(place.spec):
            del environment["TORCHDYNAMO_DISABLE"]  # Hearth's plugin lifts it for models only
        environment["PYTHONPATH"] = f"{_named_vllm(place)}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    if rust is not None:
        environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust)}
        environment["VLLM_LOGGING_LEVEL"] = "WARNING"  # it says which settings it ignores
    return environment


def _named_vllm(place: Workplace) -> Path:
    """Make a folder for PYTHONPATH in which vLLM finds its own name: the wheel for CPUs has another, and it ends."""
    shim = place.folder / "vllm-name"
    version = f"{vllm_version()}+cpu"  # by this it knows what it was built for
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        metadata = shim / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    return shim


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def status_of(host: str, port: int, path: str) -> int | None:
    """Return the status of a GET, None while nobody answers. Blocks."""
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()

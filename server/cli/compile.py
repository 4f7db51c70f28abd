"""`hearth compile`: has vLLM compile the chat models once, so that later starts on a CPU load the compiled code."""

import asyncio
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine import SETTLED, Config, Engine, EngineError, LoadError
from engine.backends.vllm.processes import runs_on_cpu
from engine.config import ChatModelSpec, load_config
from engine.pool.loader import Planned
from engine.pool.records import compiler
from server.cli.options import AsJson, DataDir, Models, WeightsDir, hardware_for, refuse, tell
from server.settings import Settings, load_settings
from server.terminal import set_up_log


def compile_models(
    names: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Default: all chat models.")] = None,
    *,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Compile chat models for faster answers on a CPU. Once for each; takes a minute or two."""
    settings = load_settings(data_dir=data_dir, models=models, weights_dir=weights_dir)
    config = load_config(settings.models)
    chosen = _chosen(config, names or [])
    if not runs_on_cpu():
        nothing = "On a GPU there is nothing to do: a model is compiled at its first start, and vLLM keeps the code."
        typer.echo(nothing, err=True)
        tell({"compiled": [], "failed": []}, as_json=as_json)
        return
    _check_tools()
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        refuse(f"{settings.data_dir} cannot be made: {error.strerror}. Name another one with --data-dir.", code=1)
    set_up_log(settings.log_level)
    done, failed = [], []
    for spec in chosen:
        try:
            done.append(asyncio.run(_compiled(config, spec, settings, drawn=not as_json)))
        except EngineError as error:
            failed.append(spec.id)
            typer.echo(f"{spec.id} cannot be compiled, and still runs uncompiled: {error.message}", err=True)
    lines = [f"Compiled: {one['model']} ({one['weights']}) in {one['seconds']} s." for one in done]
    if done:
        lines.append("Restart the server to use it; a reload leaves models alone that have not changed.")
    tell({"compiled": done, "failed": failed}, *lines, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _check_tools() -> None:
    lacking = ["a C++ compiler (`g++`, or what CXX names)"] if compiler() is None else []
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        lacking.append("Python's headers (`Python.h`)")
    if lacking:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise LoadError(
            f"Missing for a compilation: {' and '.join(lacking)}. Pick one: 1. install it (Debian, Ubuntu: "
            f"sudo apt-get install g++ python{version}-dev) and run this again; 2. leave it: models run uncompiled."
        )


def _chosen(config: Config, names: list[str]) -> list[ChatModelSpec]:
    chats = {spec.id: spec for spec in config.models.values() if isinstance(spec, ChatModelSpec)}
    adapted = {adapter.base for adapter in config.adapters.values()}
    for name in names:
        if name in adapted:
            refuse(f"{name} has adapters in models.yaml, and on a CPU vLLM runs such a model uncompiled.")
        if name not in chats:
            refuse(f"models.yaml has no chat model {name!r}. It has: {', '.join(chats) or 'none'}.")
        if chats[name].engine.enforce_eager:
            refuse(
                f"{name} has `enforce_eager: true` in models.yaml, so it is never run compiled. Take that out first."
            )
    wanted = [chats[name] for name in dict.fromkeys(names or chats) if name not in adapted]
    found = [spec for spec in wanted if not spec.engine.enforce_eager]
    if not found:
        refuse("models.yaml has no chat model that may be compiled.", code=1)
    return found


async def _compiled(config: Config, spec: ChatModelSpec, settings: Settings, *, drawn: bool) -> dict[str, Any]:
    """Start the model alone, compiled, from the folder that a server would take, and end it. Raises `EngineError`s."""
    machine = hardware_for(settings)
    planned = Planned(config, settings.weights_dir, settings.data_dir, replace(machine, gpus=()))
    folder, is_demo = planned.folder(spec)
    engine_spec = planned.chat_spec(spec, is_demo=is_demo).engine.model_copy(update={"enforce_eager": False})
    weights = spec.weights if is_demo else str(folder.resolve())
    alone = spec.model_copy(update={"engine": engine_spec, "variants": (), "weights": weights})
    engine = Engine(
        replace(config, models={spec.id: alone}, adapters={}),
        weights_dir=settings.weights_dir,
        data_dir=settings.data_dir,
        ram_gib=settings.ram_gib,
        keep_loads=False,  # with a compilation they take longer and more memory
    )
    begun = time.monotonic()
    try:
        await engine.start()
        await _ready(engine, drawn=drawn)
    finally:
        await engine.stop()
    seconds = round(time.monotonic() - begun, 1)
    return {"model": spec.id, "weights": "demo" if is_demo else str(folder), "seconds": seconds}


async def _ready(engine: Engine, *, drawn: bool) -> None:
    """Show the progress until the model is ready. Raises `LoadError`."""
    columns = (TextColumn("  {task.description:<16}"), BarColumn(bar_width=24), TextColumn("{task.fields[phase]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not drawn) as bars:
        (health,) = engine.health()
        bar = bars.add_task(health.id, total=1.0, phase="")
        while health.status not in SETTLED and health.error is None:
            await engine.wait_for_change()
            (health,) = engine.health()
            bars.update(bar, completed=health.progress, phase=health.phase)
    if health.status != "ready":
        raise LoadError(health.error or "It did not start; the lines above say why.")

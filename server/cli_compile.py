"""`hearth compile`: has vLLM compile the chat models once, so that their next starts on a CPU use the code at once."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine import SETTLED, Engine, EngineError, LoadError
from engine.backends.vllm_launch import runs_on_cpu
from engine.config import ChatModelSpec
from server.cli_store import AsJson, DataDir, Models, WeightsDir, config_for, print_json, refuse, settings_for
from server.log_lines import set_up_log

if TYPE_CHECKING:
    from engine import Config
    from server.settings import Settings

_COMPILERS = ("g++", "clang++")


def compile_models(
    names: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Default: all chat models.")] = None,
    *,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Compile chat models, so that they answer faster on a CPU. Once for each; takes a minute or two."""
    settings = settings_for(data_dir, models, weights_dir=weights_dir)
    config = config_for(settings)
    chosen = _chosen(config, names)
    if not runs_on_cpu():
        typer.echo("On a GPU there is nothing to do: a model is compiled at its first start, and vLLM keeps the code.")
        return
    if not any(map(shutil.which, _COMPILERS)):
        refuse(
            "A C++ compiler is needed, and neither g++ nor clang++ is here. Pick one: 1. install it, with the headers "
            "of Python (Debian, Ubuntu: apt-get install g++ python3-dev), and say this again; 2. leave it: models run "
            "uncompiled.",
            code=1,
        )
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        refuse(f"{settings.data_dir} cannot be made: {error.strerror}. Name another one with --data-dir.", code=1)
    set_up_log(settings.log_level)
    done = {}
    for spec in chosen:
        done[spec.id] = asyncio.run(_compiled(config, spec, settings, drawn=not as_json))
    if as_json:
        print_json({"compiled": [{"model": name, "seconds": round(took, 1)} for name, took in done.items()]})
    else:
        typer.echo(f"Compiled: {', '.join(done)}. Models use it from their next start on.")


def _chosen(config: Config, names: list[str] | None) -> list[ChatModelSpec]:
    chats = {spec.id: spec for spec in config.models.values() if isinstance(spec, ChatModelSpec)}
    for name in names or ():
        if name not in chats:
            refuse(f"{name!r} is no chat model of models.yaml. There are: {', '.join(chats) or 'none'}.")
    if not chats:
        refuse("There is no chat model in models.yaml, and only those are compiled.", code=1)
    return [chats[name] for name in dict.fromkeys(names or chats)]


async def _compiled(config: Config, spec: ChatModelSpec, settings: Settings, *, drawn: bool) -> float:
    """Start the model alone, compiled, and end it. Returns the seconds that took; ends the command if it fails."""
    insisting = spec.model_copy(update={"engine": spec.engine.model_copy(update={"enforce_eager": False})})
    alone = replace(config, models={spec.id: insisting})
    engine = Engine(
        alone,
        weights_dir=settings.weights_dir,
        data_dir=settings.data_dir,
        ram_gib=settings.ram_gib,
        keep_loads=False,  # with a compiler at work they take longer and more memory
    )
    begun = time.monotonic()
    try:
        await engine.start()
        await _ready(engine, drawn=drawn)
    except EngineError as error:
        refuse(f"{spec.id} cannot be compiled: {error.message} It goes on running uncompiled.", code=1)
    finally:
        await engine.stop()
    return time.monotonic() - begun


async def _ready(engine: Engine, *, drawn: bool) -> None:
    """Show how it comes along until it is ready. Raises `LoadError`."""
    columns = (TextColumn("  {task.description:<16}"), BarColumn(bar_width=24), TextColumn("{task.fields[phase]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not drawn) as bars:
        (health,) = engine.health()
        bar = bars.add_task(health.id, total=1.0, phase="")
        while health.status not in SETTLED:
            await engine.wait_for_change()
            (health,) = engine.health()
            bars.update(bar, completed=health.progress, phase=health.phase)
    if health.status == "failed":
        raise LoadError(health.error or "It does not start.")

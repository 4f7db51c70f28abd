"""`hearth plan`: what of models.yaml fits this machine, or an imagined one, and why. Nothing is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from engine.footprints import Footprints
from engine.hardware import HardwareError, imagined, read_hardware, with_ram
from engine.own_weights import own_folders, variants_here
from engine.placement import plan as make_plan
from engine.placement_refusal import gib
from engine.placement_report import as_data, headline, use_line, where
from engine.placement_types import Plan, Refusal
from server.cli.options import AsJson, DataDir, Models, WeightsDir, config_for, print_json, refuse, settings_for
from server.cli.plan_absent import absent, as_rows, lines
from server.instance import running_pid
from server.terminal import print_rich

if TYPE_CHECKING:
    from engine.hardware import Hardware
    from engine.placement_types import Placed
    from server.settings import Settings

_COLUMNS = ("model", "served with", "licence", "where", "memory", "KV cache", "chats x context", "state")

Gpus = Annotated[str | None, typer.Option(help="Plan for an imagined machine: 2x24GiB, 1x24GiB+1x48GiB, or cpu.")]
Ram = Annotated[float | None, typer.Option(help="RAM of the imagined machine in GiB [64].", min=1, max=65536)]


def plan(  # noqa: PLR0913 - one argument per option
    *,
    gpus: Gpus = None,
    ram: Ram = None,
    models: Models = None,
    weights_dir: WeightsDir = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what each model is served with on this machine, where it goes, and why. Exit code 1: it does not fit."""
    settings = settings_for(data_dir, models, weights_dir=weights_dir)
    config = config_for(settings)
    hardware = _hardware(gpus, ram, settings)
    folders, footprints = own_folders(config, settings.weights_dir), Footprints.read(settings.data_dir)
    found = make_plan(config, hardware, footprints, folders)
    missing = absent(config, settings.weights_dir, found) if isinstance(found, Plan) else []
    if as_json:
        print_json(as_data(found) | {"not_here": as_rows(missing)})
    elif isinstance(found, Refusal):
        typer.echo(f"{headline(found)}\n\n{found.message}.\nSmallest change: {found.change}.")
    else:
        _show(found)
        here = variants_here(config, settings.weights_dir)
        now = None if hardware.imagined else make_plan(config, hardware, footprints, folders, here)
        folder_options = {"--weights-dir": weights_dir, "--data-dir": data_dir, "--models": models}
        options = {"--gpus": gpus, "--ram": ram} | folder_options
        said = {name: None if value is None else str(value) for name, value in options.items()}
        for line in lines(missing, said, now):
            typer.echo(line)
    if isinstance(found, Refusal):
        raise typer.Exit(1)


def _hardware(gpus: str | None, ram: float | None, settings: Settings) -> Hardware:
    if gpus is None:
        if ram is not None:
            refuse("--ram belongs to an imagined machine: give --gpus too, like --gpus 2x24GiB or --gpus cpu.")
        return with_ram(
            read_hardware(settings.weights_dir, server_pid=running_pid(settings.data_dir)), settings.ram_gib
        )
    try:
        return imagined(gpus) if ram is None else imagined(gpus, ram_gib=ram)
    except HardwareError as error:
        refuse(error.message)


def _show(found: Plan) -> None:
    table = Table(*_COLUMNS, box=box.SIMPLE)
    for one in found.models:
        table.add_row(*(Text(cell) for cell in _row(one)))
    typer.echo(headline(found))
    if found.hardware.problem:
        typer.echo(f"No GPUs: {found.hardware.problem}.")
    print_rich(table)
    for one in found.models:
        typer.echo(f"{one.id}: {one.why}")
    typer.echo("")
    for use in found.devices:
        typer.echo(use_line(use))


def _row(one: Placed) -> tuple[str, ...]:
    if one.need is None:
        return (one.id, "-", "-", "-", "-", "-", "-", one.state)
    name, licence = (one.variant.id, one.variant.licence) if one.variant else ("the demo", "Apache-2.0")
    context = one.need.context_length
    each = " each" if len(one.gpus) > 1 else ""
    return (
        one.id,
        name,
        licence,
        where(one),
        f"{gib(one.device_bytes)}{each}",
        gib(one.kv_bytes) if one.kv_bytes else "",
        f"{one.chats} x {context}" if context and one.variant else "",
        one.state if one.swap_by is None else f"{one.state} ({one.swap_by})",
    )

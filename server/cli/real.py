"""`hearth serve --real`: what real models this machine would serve, what that fetches, one question, and the fetch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from engine.backends.vllm.processes import runs_on_cpu
from engine.config import Config
from engine.placement.hardware import GIB, Hardware, read_cuda
from server.cli.doctor.checks import disk_usage
from server.cli.options import hardware_for, refuse
from server.cli.plan import how_to_add, missing_of, show
from server.cli.weights import plan_for, pulled, wanted_of
from server.terminal import HEARTH, size_text

if TYPE_CHECKING:
    from engine.config import ModelSpec
    from engine.config.models import VariantSpec
    from server.settings import Settings

OLDEST_DRIVER = 580
_SPARE_BYTES = GIB


def prepare(settings: Settings, config: Config, *, yes: bool) -> None:
    """Have what the plan wants on the disk, or end with exit code 1 and the reason; nothing half-fetched is served.

    Raises `WeightsError` where there is no plan.
    """
    hardware = hardware_for(settings)
    if (reason := _unfit(hardware)) is not None:
        refuse(reason, code=1)
    found = plan_for(config, settings, hardware)
    show(found)
    missing = missing_of(config, settings.weights_dir, found)
    fetched = [(spec, variant) for spec, variant in missing if variant.repository is not None]
    for spec, variant in missing:
        if variant.repository is None:
            typer.echo(f"{spec.id}: {variant.id} is not here. Add it {how_to_add(spec, variant)}.")
    if not fetched:
        typer.echo("\nEverything that is fetched is here.")
        return
    _ask(settings, fetched, yes=yes)
    if not pulled(settings.weights_dir, [wanted_of(variant) for _, variant in fetched]):
        refuse("The server was not started. Complete files are kept: run the same command again to continue.", code=1)


def _unfit(hardware: Hardware) -> str | None:
    """Say why GPUs cannot be used here, and what to do. None: they can, or the processor is to be used."""
    if runs_on_cpu():
        return None
    if not hardware.gpus:
        return (
            f"No GPU can be used: {hardware.problem}. Pick one: 1. install NVIDIA's driver {OLDEST_DRIVER} or newer, "
            "restart and see that nvidia-smi lists the GPU; 2. ./scripts/serve --real --cpu serves small models on the "
            f"processor; 3. ./scripts/serve starts the demos. {HEARTH} doctor looks closer."
        )
    cuda = read_cuda()
    if cuda.driver is not None and cuda.torch is not None and cuda.driver < cuda.torch:
        there, needed = (".".join(map(str, version)) for version in (cuda.driver, cuda.torch))
        return (
            f"The NVIDIA driver {hardware.driver} knows CUDA {there}, and CUDA {needed} is needed: install driver "
            f"{OLDEST_DRIVER} or newer, restart, and run the same command."
        )
    return None


def _ask(settings: Settings, fetched: list[tuple[ModelSpec, VariantSpec]], *, yes: bool) -> None:
    """Show sizes and licences, refuse what the disk has no room for, and ask once."""
    typer.echo("\nTo be fetched:")
    for spec, variant in fetched:
        size = f"about {variant.fetched_gib:.1f} GiB"
        typer.echo(f"  {spec.id}: {variant.id}, {size}, licence {variant.licence}, from {variant.repository}")
    total = int(sum(variant.fetched_gib for _, variant in fetched) * GIB)
    free = disk_usage(settings.weights_dir)[2]
    typer.echo(f"Together about {size_text(total)}; {size_text(free)} are free in {settings.weights_dir}.")
    if total + _SPARE_BYTES > free:
        refuse(
            "The disk is too small. Nothing was fetched. Pick one: 1. free space; 2. set HEARTH_WEIGHTS_DIR to another "
            "disk; 3. take the largest variant out of models.yaml.",
            code=1,
        )
    if yes:
        return
    if not sys.stdin.isatty():
        refuse("This is not a terminal: --yes fetches without a question. Nothing was fetched.", code=1)
    if not typer.confirm("Fetch them under these licences?", default=True):
        refuse("Nothing was fetched, and the server was not started. ./scripts/serve starts the demos.", code=1)

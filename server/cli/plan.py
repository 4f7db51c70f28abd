"""`hearth plan`: what of models.yaml fits this machine, or an imagined one, and why. Nothing is loaded.

`prepare` is `hearth serve --real`: what real models this machine would serve, what that fetches, one question, and the
fetch.
"""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from engine.config import Config, ModelSpec, SpeechModelSpec, load_config
from engine.config.models import VariantSpec
from engine.placement.hardware import GIB, Hardware, read_cuda
from engine.placement.needs import Footprints, own_folders, variants_here
from engine.placement.plan import plan as make_plan
from engine.placement.report import as_data, gib, headline, use_line, warnings_of, where
from engine.placement.types import Placed, Plan, Refusal
from engine.weights.manifest import is_complete
from engine.weights.safety import is_there
from server.cli.options import AsJson, DataDir, Models, Preferred, WeightsDir, hardware_for, refuse, tell
from server.cli.weights import plan_for, pulled, wanted_of
from server.settings import Settings, load_settings
from server.terminal import HEARTH, print_rich, size_text, table, wrapped

Missing = list[tuple[ModelSpec, VariantSpec]]
_COLUMNS = ("model", "served with", "licence", "where", "memory", "KV cache", "chats x context", "state")
_OLDEST_DRIVER = 580
_SPARE_BYTES = GIB

_GPUS = "Plan for a hypothetical machine, its memory as nvidia-smi reports it: 1x22.5GiB, 1x24GiB+1x48GiB, or cpu."
Gpus = Annotated[str | None, typer.Option(help=_GPUS)]
Ram = Annotated[float | None, typer.Option(help="RAM of the hypothetical machine in GiB [64].", min=1, max=65536)]


def plan(  # noqa: PLR0913 - one argument per option
    *,
    gpus: Gpus = None,
    ram: Ram = None,
    prefer: Preferred = None,
    models: Models = None,
    weights_dir: WeightsDir = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show which weights serve each model on this machine, on which device, and why. Exit code 1: it does not fit."""
    settings = load_settings(data_dir=data_dir, models=models, weights_dir=weights_dir)
    config = load_config(settings.models)
    if gpus is None and ram is not None:
        refuse("--ram is for a hypothetical machine: give --gpus too, like --gpus 2x24GiB or --gpus cpu.")
    hardware = hardware_for(settings, gpus, ram, prefer)
    folders, footprints = own_folders(config, settings.weights_dir), Footprints.read(settings.data_dir)
    found = make_plan(config, hardware, footprints, folders)
    missing = missing_of(config, settings.weights_dir, found) if isinstance(found, Plan) else []
    if as_json:
        keys = ("model", "folder", "repository", "about_bytes")
        rows = [(spec.id, one.id, one.repository, int(one.fetched_gib * GIB)) for spec, one in missing]
        not_here = [dict(zip(keys, row, strict=True)) for row in rows]
        tell(as_data(found, hardware) | {"not_here": not_here}, as_json=True)
    elif isinstance(found, Refusal):
        typer.echo(f"{headline(hardware)}\n\n{found.message}.\nSmallest change: {found.change}.")
    else:
        _show(found)
        here = variants_here(config, settings.weights_dir)
        now = None if hardware.imagined else make_plan(config, hardware, footprints, folders, here)
        imagined_gpus = gpus if ram is None else None  # `hearth weights pull` knows no --ram: variants are named then
        folders_given = {"--weights-dir": weights_dir, "--data-dir": data_dir, "--models": models}
        given = {"--gpus": imagined_gpus, "--prefer": prefer, **folders_given}
        _show_to_fetch(missing, _given(given), now, named=ram is not None)
        _show_to_add(missing, _given({"--weights-dir": weights_dir, "--models": models}), now)
    if isinstance(found, Refusal):
        raise typer.Exit(1)


def _show(found: Plan) -> None:
    typer.echo(headline(found.hardware))
    if found.hardware.problem:
        typer.echo(f"No GPUs: {found.hardware.problem}.")
    print_rich(table(_COLUMNS, map(_row, found.engines)))
    for one in found.models:
        typer.echo(wrapped(f"{one.id}: {one.why}"))
    typer.echo("")
    for use in found.devices:
        typer.echo(wrapped(use_line(use)))
    for warning in warnings_of(found):
        typer.echo(wrapped(f"Warning: {warning}"))


def _row(one: Placed) -> tuple[str, ...]:
    if one.need is None:
        return (one.id, "-", "-", "-", "-", "-", "-", one.state)
    name, licence = (one.variant.id, one.variant.licence) if one.variant else ("the demo", "Apache-2.0")
    context = one.context_length
    memory = gib(one.device_bytes) + (" each" if len(one.gpus) > 1 else "")
    cache = gib(one.kv_bytes) if one.kv_bytes else ""
    chats = f"{one.chats or 1} x {context}" if context and one.variant else ""
    state = one.state if one.swap_by is None else f"{one.state} ({one.swap_by})"
    return (one.id, name, licence, where(one), memory, cache, chats, state)


def disk_usage(folder: Path) -> tuple[int, int, int]:
    """Return total, used and free bytes of the disk that a folder is on, or will be on."""
    return shutil.disk_usage(next((one for one in (folder, *folder.absolute().parents) if one.is_dir()), "/"))


def missing_of(config: Config, weights_dir: Path, found: Plan) -> Missing:
    """Return each model whose planned variant is not here, with the variant. Of voices any will do."""
    missing = []
    for model, variant in found.chosen.items():
        spec = config.models[model]
        if variant is not None and variant in spec.variants:
            is_speech = isinstance(spec, SpeechModelSpec)
            if not (is_there(weights_dir / spec.weights) if is_speech else is_complete(weights_dir / variant.id)):
                missing.append((spec, variant))
    return missing


def _given(options: Mapping[str, object]) -> list[str]:
    return [part for name, value in options.items() if value for part in (name, str(value))]


def _show_to_fetch(missing: Missing, options: Sequence[str], now: Plan | Refusal | None, *, named: bool) -> None:
    """Say what to fetch, and what answers `now`; None: the machine is imagined."""
    fetched = [(spec, variant) for spec, variant in missing if variant.repository is not None]
    if fetched:
        total = sum(variant.fetched_gib for _, variant in fetched)
        typer.echo(f"\nNot here yet, to be fetched: about {total:.1f} GiB in all")
        for spec, variant in fetched:
            source = f"about {variant.fetched_gib:.1f} GiB, from {variant.repository}"
            typer.echo(f"  {spec.id}: {variant.id}, {source}{_until(spec, now)}")
        names = [variant.id for _, variant in fetched] if named else []
        command = f"{HEARTH} {shlex.join(['weights', 'pull', *names, *options])}"
        typer.echo(f"Fetch {'them' if len(fetched) > 1 else 'it'} with: {command}")


def _show_to_add(missing: Missing, places: Sequence[str], now: Plan | Refusal | None) -> None:
    added = [(spec, variant) for spec, variant in missing if variant.repository is None]
    if added:
        typer.echo("\nNot here yet, to be added:")
    for spec, variant in added:
        typer.echo(f"  {spec.id}: {variant.id}, {_how_to_add(spec, variant, places)}{_until(spec, now)}")


def _how_to_add(spec: ModelSpec, variant: VariantSpec, places: Sequence[str] = ()) -> str:
    """Say how to add one without a repository; `places` are the options of other folders than the usual."""
    if not isinstance(spec, SpeechModelSpec):
        return f"by hand, in the folder {spec.weights}"
    from server.cli.voices import source_in  # takes time, and is needed for few models

    source = source_in(spec.weights, variant.id)
    return f"with {HEARTH} {shlex.join(['voices', 'add', source, *places])}" if source else "as docs/voices.md says"


def _until(spec: ModelSpec, now: Plan | Refusal | None) -> str:
    if now is None:
        return ""
    served = now.chosen.get(spec.id) if isinstance(now, Plan) else None
    if served is not None and not isinstance(spec, SpeechModelSpec):
        return f"; until then {served.id} answers"
    return "; until then the demo answers" if spec.demo is not None else "; until then nothing answers"


def prepare(settings: Settings, config: Config, *, yes: bool) -> None:
    """Fetch what the plan wants, or end with exit code 1 and the reason: no incomplete weights are served.

    Raises `WeightsError` if there is no plan.
    """
    hardware = hardware_for(settings)
    if (reason := _unfit(hardware)) is not None:
        refuse(reason, code=1)
    found = plan_for(config, settings, hardware)
    _show(found)
    missing = missing_of(config, settings.weights_dir, found)
    fetched = [(spec, variant) for spec, variant in missing if variant.repository is not None]
    for spec, variant in missing:
        if variant.repository is None:
            typer.echo(f"{spec.id}: {variant.id} is not here. Add it {_how_to_add(spec, variant)}.")
    if not fetched:
        typer.echo("\nEverything that can be fetched is here.")
        return
    _ask(settings, fetched, yes=yes)
    if not pulled(settings.weights_dir, [wanted_of(variant) for _, variant in fetched]):
        refuse("The server was not started. Complete files are kept: run the same command again to continue.", code=1)


def _unfit(hardware: Hardware) -> str | None:
    """Say why GPUs cannot be used here, and what to do. None: they can, or the CPU is to be used."""
    from engine.backends.vllm.processes import runs_on_cpu

    if runs_on_cpu():
        return None
    if not hardware.gpus:
        return (
            f"No GPU can be used: {hardware.problem}. Pick one: 1. install NVIDIA's driver {_OLDEST_DRIVER} or newer, "
            "restart and see that nvidia-smi lists the GPU; 2. ./scripts/serve --real --cpu serves small models on the "
            f"CPU; 3. ./scripts/serve starts the demos. {HEARTH} doctor looks closer."
        )
    cuda = read_cuda()
    if cuda.driver is not None and cuda.torch is not None and cuda.driver < cuda.torch:
        there, needed = (".".join(map(str, version)) for version in (cuda.driver, cuda.torch))
        return (
            f"The NVIDIA driver {hardware.driver} supports CUDA {there}, and CUDA {needed} is needed: install driver "
            f"{_OLDEST_DRIVER} or newer, restart, and run the same command."
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

"""`hearth weights`: fetches models, lists and verifies them, carries them to another machine.

engine/weights does the work; this file finds the repository that a name means, and shows progress.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from engine.config import Config, load_config
from engine.config.messages import near_miss
from engine.config.models import VariantSpec
from engine.errors import EngineError, WeightsError
from engine.placement.hardware import Hardware
from engine.placement.needs import Footprints, own_folders
from engine.placement.plan import plan
from engine.placement.types import Plan, Refusal
from engine.weights.download import Pull, UnreachableError, Wanted, check_room, prepared
from engine.weights.manifest import MANIFEST, Manifest, Report, required_manifest, silent, verify
from engine.weights.safety import check_folder_name, check_repository, is_there
from engine.weights.transfer import carry, found_below, local_folders, remove
from server.cli.options import AsJson, DataDir, Models, Preferred, WeightsDir, hardware_for, refuse, tell
from server.instance import running_pid
from server.observability.status import ServedWith, StatusError, ask
from server.settings import Settings, load_settings
from server.terminal import HEARTH, size_text, table

_COLUMNS = ("folder", "repository", "revision", "size", "state", "for")
_MEANINGS = {
    "complete": "complete",
    "damaged": f"damaged: {HEARTH} weights pull {{folder}} --again, or import it again",
    "own": "your own (no manifest)",
    "partial": "unfinished: pull or import it again to continue",
}

Gpus = Annotated[str | None, typer.Option(help="Plan for a machine like 2x24GiB or cpu. Default: this one.")]

app = typer.Typer(no_args_is_help=True, help="Fetch models, verify them, move them to a host without internet.")


@app.command("pull")
def pull_command(  # noqa: PLR0913 - one argument per option
    models_wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="Models or variants of models.yaml, or folders. Default: the models of the plan."
        ),
    ] = None,
    *,
    repository: Annotated[str | None, typer.Option(help="Any repository, like owner/name.")] = None,
    folder: Annotated[str | None, typer.Option("--as", help="Folder for it. Default: the repository's name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag, branch. Default: the folder's, else main.")] = None,
    subfolder: Annotated[str, typer.Option(help="Only this folder of the repository.")] = "",
    gpus: Gpus = None,
    prefer: Preferred = None,
    again: Annotated[bool, typer.Option("--again", help="Re-check existing files and fetch damaged ones.")] = False,
    weights_dir: WeightsDir = None,
    data_dir: DataDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Fetch models from a hub, verified file by file. Resumes after an interruption."""
    settings = load_settings(data_dir=data_dir, models=models, weights_dir=weights_dir)
    names = models_wanted or []
    if repository is None and (folder or subfolder or (revision and len(names) != 1)):
        refuse("--as and --subfolder go with --repository; --revision with that or with one model.")
    if repository is not None and names:
        refuse("Give either models or --repository.")
    if repository is not None:
        name = check_folder_name(folder or (subfolder or check_repository(repository)).rsplit("/", 1)[-1])
        all_wanted = [Wanted(check_repository(repository), name, revision, subfolder.strip("/"), again)]
    else:
        settings = settings.model_copy(update={"prefer": prefer or settings.prefer})
        found = _chosen(load_config(settings.models), settings, names, gpus)
        all_wanted = [replace(one, revision=revision or one.revision, again=again) for one in found]
    if not pulled(settings.weights_dir, all_wanted, as_json=as_json):
        raise typer.Exit(1)


@app.command("verify")
def verify_command(
    folders: Annotated[list[str] | None, typer.Argument(metavar="FOLDER", help="Default: all.")] = None,
    *,
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare its SHA-256 with the manifest. Exit code 1 if anything is wrong."""
    root = load_settings(weights_dir=weights_dir).weights_dir
    names = folders or [one.folder for one in local_folders(root) if one.state in {"complete", "damaged"}]
    _check_there(root, names)
    found = {name: verified(root / check_folder_name(name), name, quiet=as_json) for name in names}
    listed = [{"folder": name, "ok": not problems, "problems": problems} for name, problems in found.items()]
    lines = [f"{name}: {'; '.join(problems) or 'all files are as fetched'}" for name, problems in found.items()]
    nothing = f"Nothing here was fetched. `{HEARTH} weights pull` fetches what the plan wants."
    tell({"weights": listed}, *(lines or [nothing]), as_json=as_json)
    damaged = [name for name, problems in found.items() if problems]
    for name in damaged:
        if not as_json and (root / name / MANIFEST).exists():  # else a folder of one's own, which was not fetched
            remedy = f"{HEARTH} weights pull {name} --again, or import it again"
            typer.echo(f"  To fetch what is damaged: {remedy}", err=True)
    if damaged:
        raise typer.Exit(1)


@app.command("list")
def list_command(*, weights_dir: WeightsDir = None, models: Models = None, as_json: AsJson = False) -> None:
    """Show the folders of the weights directory: what they are, whether they are complete, and who uses them."""
    settings = load_settings(models=models, weights_dir=weights_dir)
    config = load_config(settings.models)
    root, rows, listed = settings.weights_dir, [], []
    for one in local_folders(root):
        used_by = users(config, one.folder)
        repository = "/".join(filter(None, (one.repository, one.subfolder)))
        cells = (one.folder, repository, (one.revision or "")[:12], size_text(one.size_bytes))
        rows.append((*cells, _MEANINGS[one.state].format(folder=one.folder), ", ".join(used_by)))
        listed.append(asdict(one) | {"used_by": used_by})
    nothing = f"No models are in {root}. `{HEARTH} weights pull` fetches what the plan wants."
    shown = table(_COLUMNS, rows) if rows else nothing
    tell({"weights_dir": str(root), "weights": listed}, shown, as_json=as_json)


@app.command("remove")
def remove_command(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER", help="As `hearth weights list` names them.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    weights_dir: WeightsDir = None,
    data_dir: DataDir = None,
    models: Models = None,
) -> None:
    """Remove folders, with unfinished downloads. Refused while a running server uses them."""
    settings = load_settings(data_dir=data_dir, models=models, weights_dir=weights_dir)
    config = load_config(settings.models)
    running = running_pid(settings.data_dir)
    _check_there(settings.weights_dir, folders)
    for folder in folders:
        used = serving(config, settings, folder) if running is not None else []
        if used:
            raise WeightsError(
                f"The server (process {running}) uses {folder} for {', '.join(used)}. Pick one: 1. stop the "
                f"server; 2. give the model another folder in models.yaml (of voices: delete the folder yourself), and "
                f"run `{HEARTH} reload`."
            )
        if not yes:
            typer.confirm(f"Remove {settings.weights_dir / folder}?", abort=True)
        typer.echo(f"{folder} is removed: {size_text(remove(settings.weights_dir, folder))} freed.")


@app.command("export")
def export_command(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="FOLDER", help="As `hearth weights list` names them. Default: all complete ones."),
    ] = None,
    *,
    to: Annotated[Path, typer.Option(help="Directory to write into, for example a portable disk.")],
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy folders, verified, into a directory that `hearth weights import` reads on another machine."""
    root = load_settings(weights_dir=weights_dir).weights_dir
    names = folders or _all_complete(root)
    _check_there(root, names)
    _carry_all({folder: root / folder for folder in names}, to, as_json=as_json)


@app.command("import")
def import_command(
    directory: Annotated[Path, typer.Argument(help="Output of `hearth weights export`, or one folder of it.")],
    *,
    folder: Annotated[str | None, typer.Option("--as", help="New name, for one folder. Default: its own.")] = None,
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy folders from a directory into the weights directory; each appears when all of its hashes are right."""
    root = load_settings(weights_dir=weights_dir).weights_dir
    found = found_below(directory)
    if folder is not None and len(found) != 1:
        refuse(f"{directory} contains {len(found)} models; --as names one. Import one of: {', '.join(found)}.")
    named = {folder or name or directory.resolve().name: place for name, place in found.items()}
    _carry_all(named, root, as_json=as_json)


def _chosen(config: Config, settings: Settings, names: Sequence[str], gpus: str | None) -> list[Wanted]:
    """Return what to pull for these names; for none, what the plan wants."""
    if names:
        return [_named(config, settings, name, gpus) for name in names]
    absent = [spec.id for spec in config.models.values() if not is_there(settings.weights_dir / spec.weights)]
    planned = _planned(config, settings, gpus, absent)
    return [planned[model] for model in absent if model in planned]


def _named(config: Config, settings: Settings, name: str, gpus: str | None) -> Wanted:
    """Return what a name means: a model's variant in the plan, a variant, or what a folder says that it is."""
    if name in config.models:
        return _of_model(config, settings, name, gpus)
    variants = {variant.id: variant for spec in config.models.values() for variant in spec.variants}
    if name in variants:
        return wanted_of(variants[name])
    for one in local_folders(settings.weights_dir):
        if one.folder == name and one.repository is not None:
            return Wanted(one.repository, name, one.revision, one.subfolder)
    near = near_miss(name, [*config.models, *variants])
    hint = f"did you mean {near}?" if near else f"there are {', '.join([*config.models, *variants])}."
    raise WeightsError(
        f"{name} is neither a model nor a variant of models.yaml, nor a folder that was pulled; {hint} Anything else "
        "is pulled with --repository owner/name."
    )


def _of_model(config: Config, settings: Settings, model: str, gpus: str | None) -> Wanted:
    planned = _planned(config, settings, gpus, [model])
    if model in planned:
        return planned[model]
    spec = config.models[model]
    fetched = [variant.id for variant in spec.variants if variant.repository]
    if not fetched:
        raise WeightsError(
            f"{model} has no variant with a `repository` in models.yaml. Pick one: 1. add one (docs/models-yaml.md); "
            f"2. hearth weights pull --repository owner/name --as {spec.weights}"
        )
    raise WeightsError(
        f"The plan has no variant of {model} for this machine (`hearth plan` says why). Pick one: 1. plan for the "
        f"machine that will serve it, like --gpus 1x24GiB; 2. name a variant: {', '.join(fetched)}."
    )


def _planned(config: Config, settings: Settings, gpus: str | None, again: Collection[str]) -> dict[str, Wanted]:
    """Return what the plan wants from a hub, by model; own folders of models in `again` do not count."""
    chosen = plan_for(config, settings, hardware_for(settings, gpus), again).chosen
    return {model: wanted_of(variant) for model, variant in chosen.items() if variant and variant.repository}


def plan_for(config: Config, settings: Settings, hardware: Hardware, again: Collection[str] = ()) -> Plan:
    """Make the plan; own folders of models in `again` do not count. Raises `WeightsError` if there is none."""
    own = {model: there for model, there in own_folders(config, settings.weights_dir).items() if model not in again}
    found = plan(config, hardware, Footprints.read(settings.data_dir), own)
    if isinstance(found, Refusal):
        raise WeightsError(f"There is no plan. {found.message}. Smallest change: {found.change}.")
    return found


def wanted_of(variant: VariantSpec) -> Wanted:
    if variant.repository is None:
        raise WeightsError(f"{variant.id} has no `repository` in models.yaml: its folder is made by hand.")
    return Wanted(variant.repository, variant.id, variant.revision)


def users(config: Config, folder: str) -> list[str]:
    """Return the models that a folder is for."""
    named = {spec.id: [spec.weights, *(variant.id for variant in spec.variants)] for spec in config.models.values()}
    return [model for model, names in named.items() if any(_overlap(folder, name) for name in names)]


def serving(config: Config, settings: Settings, folder: str) -> list[str]:
    """Return the models that the running server serves from a folder, or may: of some it cannot say yet."""
    possible = users(config, folder)
    loaded = {}
    with contextlib.suppress(StatusError):
        running = ask(settings.data_dir, 5) if possible else None
        loaded = {model.id: model.served_with for model in running.models} if running else {}
    return [model for model in possible if is_served(loaded.get(model), folder)]


def is_served(served: ServedWith | None, folder: str) -> bool:
    """Whether a model that was loaded with `served` needs a folder. None: it does not answer, or awaits its turn."""
    return served is None or (served.source != "demo" and _overlap(served.folder, folder))


def _overlap(folder: str, other: str) -> bool:
    return f"{folder}/".startswith(f"{other}/") or f"{other}/".startswith(f"{folder}/")


def pulled(weights_dir: Path, all_wanted: list[Wanted], *, as_json: bool = False) -> bool:
    """Fetch what can be fetched, and say what came; False if something could not be. Ends the command at Ctrl-C."""
    try:
        outcome = _pull_all(weights_dir, all_wanted, quiet=as_json)
    except KeyboardInterrupt:
        refuse("Stopped. What was fetched so far is kept: run the same command again to continue.", code=130)
    tell(outcome, *_pulled_lines(outcome), as_json=as_json)
    for error in outcome["errors"]:
        typer.echo(f"{error['folder']}: {error['message']}", err=True)
    return not outcome["errors"]


def _pull_all(weights_dir: Path, all_wanted: list[Wanted], *, quiet: bool) -> dict[str, Any]:
    """What cannot be fetched is reported at the end and delays nothing else."""
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    pulls: list[Pull] = []
    with contextlib.ExitStack() as open_pulls:
        # Two models may share a variant, and a name may be given twice
        for folder, wanted in {wanted.folder: wanted for wanted in all_wanted}.items():
            try:
                found = open_pulls.enter_context(prepared(weights_dir, wanted, silent))
            except EngineError as error:
                errors.append({"folder": folder, "message": error.message})
                if isinstance(error, UnreachableError):
                    break
                continue
            if isinstance(found, Manifest):
                rows.append(_row(folder, found, 0))
            else:
                pulls.append(found)
        check_room(weights_dir, pulls)
        for pull in pulls:
            folder, missing, total = pull.name, pull.missing_bytes, sum(file.size_bytes for file in pull.files)
            try:
                with _progress(folder, total, total - missing, quiet=quiet) as report:
                    rows.append(_row(folder, pull.run(report), missing))
            except EngineError as error:
                errors.append({"folder": folder, "message": error.message})
    return {"weights": rows, "errors": errors}


def _row(folder: str, manifest: Manifest, fetched_bytes: int) -> dict[str, Any]:
    origin = {"folder": folder, "repository": manifest.repository, "revision": manifest.revision}
    sizes = {"files": len(manifest.files), "size_bytes": manifest.size_bytes, "fetched_bytes": fetched_bytes}
    return origin | sizes


def _pulled_lines(outcome: dict[str, Any]) -> Iterator[str]:
    for row in outcome["weights"]:
        came = f"{size_text(row['fetched_bytes'])} fetched" if row["fetched_bytes"] else "was complete already"
        size = f"{row['files']} files, {size_text(row['size_bytes'])}"
        yield f"{row['folder']}: {row['repository']} at {row['revision'][:12]}, {size}; {came}."
    if not outcome["weights"] and not outcome["errors"]:
        yield (
            "The plan wants nothing from a hub: no variant in models.yaml fits this machine, or the models have "
            f"folders of their own. `{HEARTH} plan` shows it; any repository comes with --repository owner/name."
        )


def verified(folder: Path, name: str, *, quiet: bool) -> list[str]:
    """Return what is wrong with a folder; nothing if every file is as fetched."""
    try:
        with _progress(name, required_manifest(folder).size_bytes, quiet=quiet) as report:
            return verify(folder, report)
    except EngineError as error:
        return [error.message]


def _all_complete(root: Path) -> list[str]:
    """Name every folder that was fetched whole; say on standard error what is left out."""
    names = []
    for one in local_folders(root):
        if one.state == "complete":
            names.append(one.folder)
        else:
            typer.echo(f"{one.folder} is left out: {_MEANINGS[one.state]}.", err=True)
    if not names:
        raise WeightsError(f"Nothing in {root} was fetched whole. `{HEARTH} weights pull` fetches what the plan wants.")
    return names


def _check_there(root: Path, folders: Sequence[str]) -> None:
    """Raise `WeightsError` for folders of which nothing is here, before anything is done or asked."""
    wanted = dict.fromkeys(map(check_folder_name, folders))
    absent = [one for one in wanted if not any(map(os.path.lexists, (root / one, Pull(root, one).root)))]
    if absent:
        here = ", ".join(dict.fromkeys(one.folder for one in local_folders(root)))
        known = f"These are there: {here}." if here else "It is empty."
        raise WeightsError(f"There is no {' and no '.join(absent)} in {root}. {known}")


def _carry_all(folders: Mapping[str, Path], root: Path, *, as_json: bool) -> None:
    rows = []
    for name, source in folders.items():
        size_bytes = required_manifest(source).size_bytes
        try:
            with _progress(name, size_bytes, quiet=as_json) as report:
                _, copied = carry(source, root, name, report)
        except KeyboardInterrupt:
            refuse("Stopped. The same command resumes.", code=130)
        rows.append({"folder": name, "size_bytes": size_bytes, "copied": copied})
        if not as_json:
            what = f"{size_text(size_bytes)} copied and verified" if copied else "was there already"
            typer.echo(f"{root / name}: {what}.")
    tell({"directory": str(root), "weights": rows}, as_json=as_json)


@contextlib.contextmanager
def _progress(what: str, total: int, there: int = 0, *, quiet: bool) -> Iterator[Report]:
    """Show the progress of files, from several threads: bars in a terminal, else a line now and then.

    `total` is the bytes of all files, `there` what of it was there before.
    """
    if quiet:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(binary_units=True), SpeedColumn())
    drawn, lock = sys.stderr.isatty(), threading.Lock()
    tasks: dict[str, TaskID] = {}
    started = written = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(compact=True), console=Console(stderr=True), disable=not drawn) as bars:
        everything = bars.add_task(what, total=total, completed=there)

        def report(path: str, done: int, size: int) -> None:
            nonlocal written
            now = time.monotonic()
            with lock:
                if path not in tasks:
                    # What was there already does not count for the rate
                    tasks[path] = bars.add_task(f"  {path}", total=size, completed=done)
                bars.update(tasks[path], completed=done, visible=done < size)
                together = int(max(there, sum(task.completed for task in bars.tasks[1:])))
                bars.update(everything, completed=together)
                if done >= size and not drawn:
                    sys.stderr.write(f"{what}: {path} ({size_text(size)})\n")
                elif now - written >= 10 and not drawn:
                    written, rate = now, max(1.0, (together - there) / (now - started))
                    progress = f"{size_text(together)} of {size_text(total)}, {size_text(rate)}/s"
                    sys.stderr.write(f"{what}: {progress}, {(total - together) / rate / 60:.0f} min left\n")

        yield report

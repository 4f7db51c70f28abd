"""`hearth weights list`, `remove`, `export` and `import`: what lies in the weights directory, how it goes and comes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from engine.errors import EngineError
from engine.weights.download import Partial, Patience
from engine.weights.safety import check_folder_name
from engine.weights.transfer import carry, found_below, remove, shelved
from engine.weights.verify import required_manifest
from server.cli_store import AsJson, DataDir, Models, WeightsDir, config_for, print_json, refuse, settings_for
from server.cli_tables import print_rich
from server.command_name import HEARTH
from server.instance import running_pid
from server.weights_choice import serving, users
from server.weights_progress import FileProgress, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Folders = Annotated[list[str], typer.Argument(metavar="FOLDER...", help="As `hearth weights list` names them.")]

_MEANINGS = {
    "complete": "complete",
    "damaged": f"damaged: {HEARTH} weights pull FOLDER --again",
    "own": "your own (no manifest)",
    "partial": "unfinished: pull it again to go on",
}


def add_to(app: typer.Typer) -> None:
    """Make these verbs part of `hearth weights`."""
    app.command("list")(list_command)
    app.command("remove")(remove_command)
    app.command("export")(export_command)
    app.command("import")(import_command)


def list_command(*, weights_dir: WeightsDir = None, models: Models = None, as_json: AsJson = False) -> None:
    """Show the folders of the weights directory: what they are, whether they are complete, and who uses them."""
    settings = settings_for(models=models, weights_dir=weights_dir)
    config = config_for(settings)
    try:
        found = shelved(settings.weights_dir)
    except EngineError as error:
        refuse(error.message, code=1)
    if as_json:
        listed = [asdict(one) | {"used_by": users(config, one.folder)} for one in found]
        print_json({"weights_dir": str(settings.weights_dir), "weights": listed})
        return
    if not found:
        typer.echo(f"No models are in {settings.weights_dir}. `{HEARTH} weights pull` fetches what the plan wants.")
        return
    table = Table("folder", "repository", "revision", "size", "state", "for", box=box.SIMPLE)
    for one in found:
        repository = "/".join(part for part in (one.repository, one.subfolder) if part)
        cells = (one.folder, repository, (one.revision or "")[:12], size_text(one.size_bytes), _MEANINGS[one.state])
        table.add_row(*(Text(cell) for cell in cells), Text(", ".join(users(config, one.folder))))
    print_rich(table)


def remove_command(
    folders: Folders,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    weights_dir: WeightsDir = None,
    data_dir: DataDir = None,
    models: Models = None,
) -> None:
    """Remove folders, and what is unfinished of them. Refused while a server runs that uses them."""
    settings = settings_for(data_dir, models, weights_dir=weights_dir)
    config = config_for(settings)
    running = running_pid(settings.data_dir)
    try:
        check_there(settings.weights_dir, folders)
        for folder in folders:
            used = serving(config, settings, check_folder_name(folder)) if running is not None else []
            if used:
                refuse(
                    f"The server (process {running}) uses {folder} for {', '.join(used)}. Pick one: 1. stop the "
                    f"server; 2. give the model another folder in models.yaml and run `{HEARTH} reload`.",
                    code=1,
                )
            if not yes:
                typer.confirm(f"Remove {settings.weights_dir / folder}?", abort=True)
            typer.echo(f"{folder} is removed: {size_text(remove(settings.weights_dir, folder))} freed.")
    except EngineError as error:
        refuse(error.message, code=1)


def export_command(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="As `hearth weights list` names them. None: all complete ones."),
    ] = None,
    *,
    to: Annotated[Path, typer.Option(help="Directory to write into, like a disk to be carried.")],
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy folders, verified, into a directory that `hearth weights import` reads on another machine."""
    root = settings_for(weights_dir=weights_dir).weights_dir
    try:
        names = folders or _all_complete(root)
        check_there(root, names)
        _carry_all({folder: root / folder for folder in names}, to, as_json=as_json)
    except EngineError as error:
        refuse(error.message, code=1)


def _all_complete(root: Path) -> list[str]:
    """Name every folder that was fetched whole; say on standard error what is left out."""
    found = shelved(root) if root.is_dir() else []
    for one in found:
        if one.state != "complete":
            typer.echo(f"{one.folder} is left out: {_MEANINGS[one.state]}.", err=True)
    names = [one.folder for one in found if one.state == "complete"]
    if not names:
        refuse(f"Nothing in {root} was fetched whole. `{HEARTH} weights pull` fetches what the plan wants.", code=1)
    return names


def check_there(root: Path, folders: Sequence[str]) -> None:
    """Refuse before anything is done or asked, where no such folder is there or was ever begun.

    Raises `WeightsError` for a name that leads elsewhere.
    """
    absent = [
        folder
        for folder in dict.fromkeys(map(check_folder_name, folders))
        if not any(os.path.lexists(place) for place in (root / folder, Partial(root, folder).root))
    ]
    if absent:
        here = ", ".join(dict.fromkeys(one.folder for one in shelved(root))) if root.is_dir() else ""
        known = f"These are there: {here}." if here else "It is empty."
        refuse(f"There is no {' and no '.join(absent)} in {root}. {known}", code=1)


def import_command(
    directory: Annotated[Path, typer.Argument(help="What `hearth weights export` wrote, or one folder of it.")],
    *,
    folder: Annotated[str | None, typer.Option("--as", help="Folder for it, if it is one. Default: its name.")] = None,
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy folders from a directory into the weights directory; each appears when all of its hashes are right."""
    root = settings_for(weights_dir=weights_dir).weights_dir
    try:
        found = found_below(directory)
        if folder is not None and len(found) != 1:
            refuse(f"{directory} holds {len(found)} models; --as names one. Import one of: {', '.join(found)}.")
        named = {folder or name or directory.resolve().name: place for name, place in found.items()}
        _carry_all(named, root, as_json=as_json)
    except EngineError as error:
        refuse(error.message, code=1)


def _carry_all(folders: Mapping[str, Path], root: Path, *, as_json: bool) -> None:
    rows = []
    for name, source in folders.items():
        manifest = required_manifest(source)
        try:
            with FileProgress(name, manifest.size_bytes, quiet=as_json) as progress:
                _, copied = carry(source, root, name, progress.report, Patience())
        except KeyboardInterrupt:
            refuse("Stopped. The same command goes on.", code=130)
        rows.append({"folder": name, "size_bytes": manifest.size_bytes, "copied": copied})
        if not as_json:
            what = f"{size_text(manifest.size_bytes)} copied and verified" if copied else "was there already"
            typer.echo(f"{root / name}: {what}.")
    if as_json:
        print_json({"directory": str(root), "weights": rows})

"""`hearth weights`: fetches models, says what lies there and whether it is whole, carries it to another machine.

Which repositories a name means is wanted.py's; what is fetched and how is engine/weights'.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from engine.errors import EngineError
from engine.weights.download import Partial, Pull, Wanted, check_room, prepared
from engine.weights.errors import UnreachableError
from engine.weights.manifest import Manifest, required_manifest, verify
from engine.weights.safety import check_folder_name, check_repository
from engine.weights.transfer import carry, found_below, local_folders, remove
from server.cli.options import AsJson, DataDir, Models, WeightsDir, config_for, print_json, refuse, settings_for
from server.cli.progress import FileProgress
from server.cli.wanted import chosen, serving, users
from server.instance import running_pid
from server.terminal import HEARTH, print_rich, size_text, table

_MEANINGS = {
    "complete": "complete",
    "damaged": f"damaged: {HEARTH} weights pull FOLDER --again",
    "own": "your own (no manifest)",
    "partial": "unfinished: pull it again to go on",
}

Gpus = Annotated[str | None, typer.Option(help="Plan for this machine, like 2x24GiB or cpu. Default: this one.")]

app = typer.Typer(no_args_is_help=True, help="Fetch models, verify them, carry them to a host without internet.")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        refuse(error.message, code=1)


@app.command("pull")
@_refusing()
def pull_command(  # noqa: PLR0913 - one argument per option
    models_wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="Models or variants of models.yaml, or folders. Default: the models of the plan."
        ),
    ] = None,
    *,
    repository: Annotated[str | None, typer.Option(help="Any repository, like owner/name.")] = None,
    folder: Annotated[str | None, typer.Option("--as", help="Folder for it. Default: the repository's name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch. Default: the folder's, or main.")] = None,
    subfolder: Annotated[str, typer.Option(help="Only this folder of the repository.")] = "",
    gpus: Gpus = None,
    again: Annotated[bool, typer.Option("--again", help="Hash what is there and fetch what is damaged.")] = False,
    weights_dir: WeightsDir = None,
    data_dir: DataDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Fetch models from a hub, verified file by file. Run again after a break, it goes on where it was."""
    settings = settings_for(data_dir, models, weights_dir=weights_dir)
    names = models_wanted or []
    if repository is None and (folder or subfolder or (revision and len(names) != 1)):
        refuse("--as and --subfolder go with --repository; --revision with that or with one model.")
    if repository is not None and names:
        refuse("Give either models or --repository.")
    try:
        if repository is not None:
            name = check_folder_name(folder or (subfolder or check_repository(repository)).rsplit("/", 1)[-1])
            all_wanted = [Wanted(check_repository(repository), name, revision, subfolder.strip("/"), again)]
        else:
            all_wanted = [
                replace(one, revision=revision or one.revision, again=again)
                for one in chosen(config_for(settings), settings, names, gpus)
            ]
        outcome = _pull_all(settings.weights_dir, all_wanted, quiet=as_json)
    except KeyboardInterrupt:
        refuse("Stopped. What was fetched so far is kept: the same command goes on.", code=130)
    if as_json:
        print_json(outcome)
    else:
        _show_pulled(outcome)
    for error in outcome["errors"]:
        typer.echo(f"{error['folder']}: {error['message']}", err=True)
    if outcome["errors"]:
        raise typer.Exit(1)


@app.command("verify")
@_refusing()
def verify_command(
    folders: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]...", help="Default: all.")] = None,
    *,
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare its SHA-256 with the manifest. Exit code 1 if anything is wrong."""
    root = settings_for(weights_dir=weights_dir).weights_dir
    names = folders or [one.folder for one in local_folders(root) if one.state in {"complete", "damaged"}]
    _check_there(root, names)
    found = {name: _verified(root / check_folder_name(name), name, quiet=as_json) for name in names}
    if as_json:
        listed = [{"folder": name, "ok": not problems, "problems": problems} for name, problems in found.items()]
        print_json({"weights": listed})
    for name, problems in found.items() if not as_json else ():
        typer.echo(f"{name}: {'; '.join(problems) or 'all files are what was fetched'}")
        if problems:
            typer.echo(f"  To fetch what is damaged: {HEARTH} weights pull {name} --again", err=True)
    if not found and not as_json:
        typer.echo(f"Nothing here was fetched. `{HEARTH} weights pull` fetches what the plan wants.")
    if any(found.values()):
        raise typer.Exit(1)


@app.command("list")
@_refusing()
def list_command(*, weights_dir: WeightsDir = None, models: Models = None, as_json: AsJson = False) -> None:
    """Show the folders of the weights directory: what they are, whether they are complete, and who uses them."""
    settings = settings_for(models=models, weights_dir=weights_dir)
    config = config_for(settings)
    found = local_folders(settings.weights_dir)
    if as_json:
        listed = [asdict(one) | {"used_by": users(config, one.folder)} for one in found]
        print_json({"weights_dir": str(settings.weights_dir), "weights": listed})
        return
    if not found:
        typer.echo(f"No models are in {settings.weights_dir}. `{HEARTH} weights pull` fetches what the plan wants.")
        return
    drawn = table("folder", "repository", "revision", "size", "state", "for")
    for one in found:
        repository = "/".join(part for part in (one.repository, one.subfolder) if part)
        cells = (one.folder, repository, (one.revision or "")[:12], size_text(one.size_bytes), _MEANINGS[one.state])
        drawn.add_row(*map(Text, (*cells, ", ".join(users(config, one.folder)))))
    print_rich(drawn)


@app.command("remove")
@_refusing()
def remove_command(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER...", help="As `hearth weights list` names them.")],
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
    _check_there(settings.weights_dir, folders)
    for folder in folders:
        used = serving(config, settings, folder) if running is not None else []
        if used:
            refuse(
                f"The server (process {running}) uses {folder} for {', '.join(used)}. Pick one: 1. stop the "
                f"server; 2. give the model another folder in models.yaml and run `{HEARTH} reload`.",
                code=1,
            )
        if not yes:
            typer.confirm(f"Remove {settings.weights_dir / folder}?", abort=True)
        typer.echo(f"{folder} is removed: {size_text(remove(settings.weights_dir, folder))} freed.")


@app.command("export")
@_refusing()
def export_command(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="As `hearth weights list` names them. Default: all complete ones."),
    ] = None,
    *,
    to: Annotated[Path, typer.Option(help="Directory to write into, like a disk to be carried.")],
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy folders, verified, into a directory that `hearth weights import` reads on another machine."""
    root = settings_for(weights_dir=weights_dir).weights_dir
    names = folders or _all_complete(root)
    _check_there(root, names)
    _carry_all({folder: root / folder for folder in names}, to, as_json=as_json)


@app.command("import")
@_refusing()
def import_command(
    directory: Annotated[Path, typer.Argument(help="What `hearth weights export` wrote, or one folder of it.")],
    *,
    folder: Annotated[str | None, typer.Option("--as", help="Folder for it, if it is one. Default: its name.")] = None,
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy folders from a directory into the weights directory; each appears when all of its hashes are right."""
    root = settings_for(weights_dir=weights_dir).weights_dir
    found = found_below(directory)
    if folder is not None and len(found) != 1:
        refuse(f"{directory} holds {len(found)} models; --as names one. Import one of: {', '.join(found)}.")
    named = {folder or name or directory.resolve().name: place for name, place in found.items()}
    _carry_all(named, root, as_json=as_json)


def _pull_all(weights_dir: Path, all_wanted: list[Wanted], *, quiet: bool) -> dict[str, Any]:
    """Fetch what can be fetched; what cannot is reported at the end and delays nothing else."""
    outcome: dict[str, Any] = {"weights": [], "errors": []}
    with contextlib.ExitStack() as open_pulls:
        pulls: list[Pull] = []
        # Two models may share a variant, and a name may be given twice
        for wanted in {wanted.folder: wanted for wanted in all_wanted}.values():
            try:
                with FileProgress(wanted.folder, 0, quiet=True) as looking:
                    found = open_pulls.enter_context(prepared(weights_dir, wanted, looking.report))
            except EngineError as error:
                outcome["errors"].append({"folder": wanted.folder, "message": error.message})
                if isinstance(error, UnreachableError):
                    break
                continue
            if isinstance(found, Manifest):
                outcome["weights"].append(_row(wanted.folder, found, 0))
            else:
                pulls.append(found)
        check_room(weights_dir, pulls)
        for pull in pulls:
            try:
                outcome["weights"].append(_run(pull, quiet=quiet))
            except EngineError as error:
                outcome["errors"].append({"folder": pull.wanted.folder, "message": error.message})
    return outcome


def _run(pull: Pull, *, quiet: bool) -> dict[str, Any]:
    missing, total = pull.missing_bytes, sum(file.size_bytes for file in pull.files)
    with FileProgress(pull.wanted.folder, total, total - missing, quiet=quiet) as progress:
        manifest = pull.run(progress.report)
    return _row(pull.wanted.folder, manifest, missing)


def _row(folder: str, manifest: Manifest, fetched_bytes: int) -> dict[str, Any]:
    return {
        "folder": folder,
        "repository": manifest.repository,
        "revision": manifest.revision,
        "files": len(manifest.files),
        "size_bytes": manifest.size_bytes,
        "fetched_bytes": fetched_bytes,
    }


def _show_pulled(outcome: dict[str, Any]) -> None:
    for row in outcome["weights"]:
        came = f"{size_text(row['fetched_bytes'])} fetched" if row["fetched_bytes"] else "was complete already"
        typer.echo(
            f"{row['folder']}: {row['repository']} at {row['revision'][:12]}, {row['files']} files, "
            f"{size_text(row['size_bytes'])}; {came}."
        )
    if not outcome["weights"] and not outcome["errors"]:
        typer.echo(
            "The plan wants nothing from a hub: no variant in models.yaml fits this machine, or the models have "
            f"folders of their own. `{HEARTH} plan` shows it; any repository comes with --repository owner/name."
        )


def _verified(folder: Path, name: str, *, quiet: bool) -> list[str]:
    try:
        total = required_manifest(folder).size_bytes
    except EngineError as error:
        return [error.message]
    with FileProgress(name, total, quiet=quiet) as progress:
        return verify(folder, progress.report)


def _all_complete(root: Path) -> list[str]:
    """Name every folder that was fetched whole; say on standard error what is left out."""
    found = local_folders(root) if root.is_dir() else []
    for one in found:
        if one.state != "complete":
            typer.echo(f"{one.folder} is left out: {_MEANINGS[one.state]}.", err=True)
    names = [one.folder for one in found if one.state == "complete"]
    if not names:
        refuse(f"Nothing in {root} was fetched whole. `{HEARTH} weights pull` fetches what the plan wants.", code=1)
    return names


def _check_there(root: Path, folders: Sequence[str]) -> None:
    """Refuse before anything is done or asked, where no such folder is there or was ever begun.

    Raises `WeightsError` for a name that leads elsewhere.
    """
    absent = [
        folder
        for folder in dict.fromkeys(map(check_folder_name, folders))
        if not any(os.path.lexists(place) for place in (root / folder, Partial(root, folder).root))
    ]
    if absent:
        here = ", ".join(dict.fromkeys(one.folder for one in local_folders(root))) if root.is_dir() else ""
        known = f"These are there: {here}." if here else "It is empty."
        refuse(f"There is no {' and no '.join(absent)} in {root}. {known}", code=1)


def _carry_all(folders: Mapping[str, Path], root: Path, *, as_json: bool) -> None:
    rows = []
    for name, source in folders.items():
        manifest = required_manifest(source)
        try:
            with FileProgress(name, manifest.size_bytes, quiet=as_json) as progress:
                _, copied = carry(source, root, name, progress.report)
        except KeyboardInterrupt:
            refuse("Stopped. The same command goes on.", code=130)
        rows.append({"folder": name, "size_bytes": manifest.size_bytes, "copied": copied})
        if not as_json:
            what = f"{size_text(manifest.size_bytes)} copied and verified" if copied else "was there already"
            typer.echo(f"{root / name}: {what}.")
    if as_json:
        print_json({"directory": str(root), "weights": rows})

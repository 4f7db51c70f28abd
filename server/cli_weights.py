"""`hearth weights pull` and `verify`: fetches models and says whether they are still what was fetched.

Which lie there, and how they go and come, is cli_weights_shelf.py's; what is fetched and how is engine/weights'.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import EngineError
from engine.weights.download import Pull, Wanted, check_room, prepared
from engine.weights.errors import UnreachableError
from engine.weights.manifest import Manifest
from engine.weights.safety import check_folder_name, check_repository
from engine.weights.transfer import shelved
from engine.weights.verify import required_manifest, verify
from server import cli_weights_shelf
from server.cli_store import AsJson, DataDir, Models, WeightsDir, config_for, print_json, refuse, settings_for
from server.command_name import HEARTH
from server.weights_choice import chosen
from server.weights_progress import FileProgress, size_text

if TYPE_CHECKING:
    from pathlib import Path

app = typer.Typer(no_args_is_help=True, help="Fetch models, verify them, carry them to a host without internet.")

Gpus = Annotated[str | None, typer.Option(help="Plan for this machine, like 2x24GiB or cpu. Default: this one.")]


@app.command("pull")
def pull_command(  # noqa: PLR0913 - one argument per option
    models_wanted: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Models or variants of models.yaml, or folders. None: the plan's."),
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
            config = config_for(settings)
            all_wanted = [
                Wanted(one.repository, one.folder, revision or one.revision, one.subfolder, again)
                for one in chosen(config, settings, names, gpus)
            ]
        outcome = _pull_all(settings.weights_dir, all_wanted, quiet=as_json)
    except EngineError as error:
        refuse(error.message, code=1)
    except KeyboardInterrupt:
        refuse("Stopped. What was fetched so far is kept: the same command goes on.", code=130)
    _tell(outcome, as_json=as_json)


@app.command("verify")
def verify_command(
    folders: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]...", help="None: all.")] = None,
    *,
    weights_dir: WeightsDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every file and compare its SHA-256 with the manifest. Exit code 1 if anything is wrong."""
    root = settings_for(weights_dir=weights_dir).weights_dir
    found: dict[str, list[str]] = {}
    try:
        names = folders or [one.folder for one in shelved(root) if one.state in {"complete", "damaged"}]
        cli_weights_shelf.check_there(root, names)
        for name in names:
            found[name] = _verified(root / check_folder_name(name), name, quiet=as_json)
    except EngineError as error:
        refuse(error.message, code=1)
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


cli_weights_shelf.add_to(app)


def _verified(folder: Path, name: str, *, quiet: bool) -> list[str]:
    try:
        total = required_manifest(folder).size_bytes
    except EngineError as error:
        return [error.message]
    with FileProgress(name, total, quiet=quiet) as progress:
        return verify(folder, progress.report)


def _pull_all(weights_dir: Path, all_wanted: list[Wanted], *, quiet: bool) -> dict[str, Any]:
    """Fetch what can be fetched; what cannot is told at the end and holds up nothing else."""
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


def _tell(outcome: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(outcome)
    else:
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
    for error in outcome["errors"]:
        typer.echo(f"{error['folder']}: {error['message']}", err=True)
    if outcome["errors"]:
        raise typer.Exit(1)

"""`hearth restore`: puts back what `hearth backup` wrote. How the files are exchanged is store/restore.py's."""

from __future__ import annotations

import os
from pathlib import Path  # typer reads the annotations
from typing import Annotated

import typer

from server.cli_store import DataDir, refuse, settings_for
from server.command_name import HEARTH
from server.instance import InstanceError, only_one, running_pid
from server.settings import database_url
from server.store import StoreError
from server.store.api_key import utc_now
from server.store.backup import restore as put_back
from server.store.database import parse_url
from server.store.sqlite import SQLITE


def restore(
    file: Annotated[Path, typer.Argument(help="What `hearth backup` wrote.")],
    *,
    data_dir: DataDir = None,
) -> None:
    """Put a backup in the place of the database; the old one is moved aside. Refused while a server runs.

    Exit code 1: it was refused, and nothing has changed.
    """
    settings = settings_for(data_dir)
    folder = settings.data_dir
    try:
        url = parse_url(database_url(settings))
        if url.drivername != SQLITE:
            refuse(
                "The keys are in PostgreSQL (HEARTH_DATABASE_URL), whose tools restore them: stop the server, then "
                "pg_restore --clean --if-exists --dbname=DATABASE FILE, with what pg_dump --format=custom wrote.",
                code=1,
            )
        if folder.is_dir() and folder.stat().st_uid != os.geteuid():
            refuse(
                f"The data directory {folder} is not yours, and the server could not read what you put there. Run this "
                f"as its user: sudo -u {folder.owner()} {HEARTH} restore ...",
                code=1,
            )
        running = running_pid(folder)
        if running is not None:
            refuse(
                f"A server (process {running}) runs on {folder}: stop it first (systemctl stop hearth, or Ctrl-C where "
                "it was started). Nothing was changed.",
                code=1,
            )
        with only_one(folder):  # so that none starts meanwhile
            done = put_back(file, Path(url.database or ""), utc_now())
    except (StoreError, InstanceError) as error:
        refuse(str(error), code=1)
    if done.aside:
        typer.echo(f"The database of before was moved aside: {', '.join(map(str, done.aside))}.")
    typer.echo(f"{file} is {url.database} now: {done.keys} keys, schema {done.version}, sound, mode 600.")
    typer.echo("Keys that were revoked since that backup work again: revoke them anew. Then start the server.")

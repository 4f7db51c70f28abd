"""`hearth audit`, `backup` and `restore`: who changed what, a copy of all of it, and the way back."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from server.cli.options import AsJson, DataDir, in_store, print_json, read_time, refuse, settings_for
from server.instance import InstanceError, only_one, running_pid
from server.observability.moments import iso, past
from server.settings import database_url
from server.store import AuditLog, Database, StoreError
from server.store.database import parse_url
from server.store.schema import utc_now
from server.store.sqlite import SQLITE
from server.store.sqlite import restore as put_back
from server.terminal import HEARTH, print_rich, table

_CHANGES = {"key.update", "key.expire"}


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")] = 50,
    since: Annotated[str | None, typer.Option(help="Only from then on: 7d (also m, h, w), 2026-11-21.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed keys and configuration, the newest first."""
    start = None if since is None else read_time("--since", since, past, utc_now())
    entries = in_store(settings_for(data_dir), lambda database: AuditLog(database).read(limit, start))
    if as_json:
        print_json({"entries": [asdict(entry) | {"at": iso(entry.at)} for entry in entries]})
        return
    if not entries:
        typer.echo("Nothing was changed" + (" since then." if since else " yet."))
        return
    drawn = table("when (UTC)", "who", "from", "what", "of", "detail")
    for entry in entries:
        cells = (f"{entry.at:%Y-%m-%d %H:%M:%S}", entry.actor, entry.origin, entry.action, entry.object)
        drawn.add_row(*map(Text, (*cells, _detail_text(entry.detail, changed=entry.action in _CHANGES))))
    print_rich(drawn)


def backup(
    path: Annotated[Path, typer.Argument(help="Where to write the copy. Nothing is there yet.")],
    *,
    data_dir: DataDir = None,
) -> None:
    """Copy the whole database, with keys, usage and audit log, while the server goes on."""

    async def copy(database: Database) -> None:
        await database.backup(path)

    in_store(settings_for(data_dir), copy)
    typer.echo(f"Copied to {path} ({path.stat().st_size / 1024:.0f} KiB). It holds hashes of the keys: keep it safe.")
    typer.echo(f"To put it back: stop the server, then {HEARTH} restore {path}")


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


def _detail_text(detail: dict[str, Any], *, changed: bool) -> str:
    """Write what an entry holds; in a change, two values are the one before and the one after."""
    parts = []
    for name, value in detail.items():
        if changed and isinstance(value, list) and len(value) == 2:
            parts.append(f"{name} {_value(value[0])} -> {_value(value[1])}")
        elif value is not None:
            parts.append(f"{name} {_value(value)}")
    return ", ".join(parts)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

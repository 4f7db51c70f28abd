"""`hearth audit`, `backup` and `restore`: who changed what, a copy of all of it, and the way back."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.options import AsJson, DataDir, in_store, read_time, tell
from server.instance import InstanceError, only_one, running_pid
from server.observability.moments import iso, past
from server.settings import database_url, load_settings
from server.store.audit import AuditEntry, read_entries
from server.store.database import Database, parse_url
from server.store.errors import StoreError
from server.store.keys import KeyStore
from server.store.schema import utc_now
from server.store.sqlite import SQLITE
from server.store.sqlite import restore as put_back
from server.terminal import HEARTH, table

_COLUMNS = ("when (UTC)", "who", "from", "what", "of", "detail")


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")] = 50,
    since: Annotated[str | None, typer.Option(help="Start: 7d (also m, h, w), 2026-11-21.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed keys and configuration, the newest first."""
    start = None if since is None else read_time("--since", since, past, utc_now())
    entries = in_store(load_settings(data_dir=data_dir), lambda database: read_entries(database, limit, start))
    nothing = "Nothing was changed since then." if since else "Nothing was changed yet."
    when = "%Y-%m-%d %H:%M:%S"
    rows = [(f"{one.at:{when}}", one.actor, one.origin, one.action, one.object, _detail_text(one)) for one in entries]
    shown = table(_COLUMNS, rows) if rows else nothing
    tell({"entries": [asdict(entry) | {"at": iso(entry.at)} for entry in entries]}, shown, as_json=as_json)


def backup(
    path: Annotated[Path, typer.Argument(help="Where to write the copy. Must not exist yet.")],
    *,
    data_dir: DataDir = None,
) -> None:
    """Copy the whole database (keys, usage, audit log) while the server runs."""
    settings = load_settings(data_dir=data_dir)

    async def copy(database: Database) -> int:
        await database.backup(path)
        return len(await KeyStore(database).list())

    keys = in_store(settings, copy)
    typer.echo(
        f"Copied to {path} ({path.stat().st_size / 1024:.0f} KiB), with {keys} keys of {settings.data_dir}. "
        "It contains their hashes: store it safely."
    )
    typer.echo("Files of batches are not in it, nor are images and logs.")
    typer.echo(f"To put it back: stop the server, then {HEARTH} restore {path}")


def restore(
    file: Annotated[Path, typer.Argument(help="A file written by `hearth backup`.")], *, data_dir: DataDir = None
) -> None:
    """Replace the database by a backup; the old one is moved aside. Refused while a server runs.

    Exit code 1: it was refused, and nothing has changed.
    """
    settings = load_settings(data_dir=data_dir)
    folder, url = settings.data_dir, parse_url(database_url(settings))
    if url.drivername != SQLITE:
        raise StoreError(
            "The keys are in PostgreSQL (HEARTH_DATABASE_URL), whose tools restore them: stop the server, then "
            "pg_restore --clean --if-exists --dbname=DATABASE FILE, with what pg_dump --format=custom wrote."
        )
    if folder.is_dir() and folder.stat().st_uid != os.geteuid():
        raise InstanceError(
            f"The data directory {folder} is not yours, and the server could not read what you put there. Run this "
            f"as its user: sudo -u {folder.owner()} {HEARTH} restore ..."
        )
    running = running_pid(folder)
    if running is not None:
        raise InstanceError(
            f"A server (process {running}) runs on {folder}: stop it first (systemctl stop hearth, or Ctrl-C where "
            "it was started). Nothing was changed."
        )
    with only_one(folder):  # so that none starts meanwhile
        version, keys, aside = put_back(file, Path(url.database or ""), utc_now())
    if aside:
        typer.echo(f"The previous database was kept as {', '.join(map(str, aside))}.")
    typer.echo(f"{file} is {url.database} now: {keys} keys, schema {version}, sound, mode 600.")
    typer.echo("Keys that were revoked since that backup work again: revoke them again. Then start the server.")


def _detail_text(entry: AuditEntry) -> str:
    """Write what an entry holds; in a change, two values are the one before and the one after."""
    parts = []
    for name, value in entry.detail.items():
        if entry.action in {"key.update", "key.expire"} and isinstance(value, list) and len(value) == 2:
            parts.append(f"{name} {_value(value[0])} -> {_value(value[1])}")
        elif value is not None:
            parts.append(f"{name} {_value(value)}")
    return ", ".join(parts)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""`hearth audit` and `hearth backup`: who changed what, and a copy of all of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from server.cli.options import (
    AsJson,
    DataDir,
    in_store,
    print_json,
    read_time,
    settings_for,
)
from server.moments import iso, past
from server.store import AuditLog, Database
from server.store.api_key import utc_now
from server.terminal import HEARTH, print_rich

_CHANGES = {"key.update", "key.expire"}


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
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
    table = Table("when (UTC)", "who", "from", "what", "of", "detail", box=box.SIMPLE)
    for entry in entries:
        cells = (f"{entry.at:%Y-%m-%d %H:%M:%S}", entry.actor, entry.origin, entry.action, entry.object)
        table.add_row(*map(Text, (*cells, _told(entry.detail, changed=entry.action in _CHANGES))))
    print_rich(table)


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


def _told(detail: dict[str, Any], *, changed: bool) -> str:
    """Write what an entry holds; in a change, two values are the one before and the one after."""
    told = []
    for name, value in detail.items():
        if changed and isinstance(value, list) and len(value) == 2:
            told.append(f"{name} {_value(value[0])} -> {_value(value[1])}")
        elif value is not None:
            told.append(f"{name} {_value(value)}")
    return ", ".join(told)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

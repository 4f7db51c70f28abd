"""`hearth usage`, `audit`, `backup` and `restore`: who used and changed what, copies of the database, their return."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.text import Text

from server.api.admin.schema import UsageSum, groups
from server.cli.options import AsJson, DataDir, in_store, key_named, read_time, refuse, tell
from server.instance import InstanceError, only_one, running_pid
from server.settings import database_url, load_settings
from server.store import StoreError
from server.store.audit import AuditEntry, read_entries
from server.store.database import Database, parse_url
from server.store.keys import KeyStore
from server.store.schema import utc_now
from server.store.sqlite import SQLITE
from server.store.sqlite import restore as put_back
from server.store.usage import FIELDS, GroupBy, UsageBook, UsageRow
from server.terminal import HEARTH, table
from server.validation import iso, past

_COLUMNS = ("when (UTC)", "who", "from", "what", "of", "detail")
_LEVELS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10


def usage(  # noqa: PLR0913 - one argument per option
    *,
    key: Annotated[str | None, typer.Option(callback=key_named, help="Only this key, by its id.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    since: Annotated[str, typer.Option(help="Start: 24h (also m, d, w), 2026-11-21.")] = "7d",
    until: Annotated[str | None, typer.Option(help="End of the period, rounded up to the hour. Default: now.")] = None,
    by: Annotated[str, typer.Option(help="hour, day, key, model, kind, or several: day,key.")] = "day",
    data_dir: DataDir = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV and nothing else.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show requests and tokens. A running server writes them every 5 seconds."""
    if as_csv and as_json:
        refuse("--csv and --json exclude each other. Give one.")
    now = utc_now()
    start = read_time("--since", since, past, now)
    end = now + timedelta(seconds=1) if until is None else read_time("--until", until, past, now)
    if end <= start:
        refuse("--until must be later than --since. Give an earlier --since.")
    try:
        group_by = groups(by)
    except ValueError as error:
        refuse(f"--by {by!r} {error}.")

    async def read(database: Database) -> tuple[list[UsageRow], dict[str, str]]:
        if key is not None:
            await KeyStore(database).find(key)  # a mistyped id would look like an unused key
        rows = await UsageBook(database).read(start, end, key=key, model=model, group_by=group_by)
        return rows, {found.public_id: found.name for found in await KeyStore(database).list()}

    rows, names = in_store(load_settings(data_dir=data_dir), read)
    data = [UsageSum.of(row).model_dump() | {"key_name": names.get(row.key or "")} for row in rows]
    if as_csv:
        writer = csv.DictWriter(sys.stdout, [*UsageSum.model_fields, "key_name"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(data)
        return
    nothing = f"Nothing was used since {start:%Y-%m-%d %H:%M} UTC. Look further back with --since 30d."
    shown = _drawn(rows, group_by, names, (start, end)) if rows else [nothing]
    tell({"data": data}, *shown, as_json=as_json)


def _drawn(
    rows: Sequence[UsageRow], group_by: Sequence[GroupBy], names: dict[str, str], span: tuple[datetime, datetime]
) -> list[RenderableType]:
    counted = [name for name in FIELDS if name == "requests" or any(getattr(row.usage, name) for row in rows)]
    places = [f"{group} (UTC)" if group in {"hour", "day"} else group for group in group_by]
    most = max(_tokens(row) for row in rows)
    cells: list[tuple[RenderableType, ...]] = []
    for row in rows:
        where = [_place(row, group, names) for group in group_by]
        numbers = [f"{getattr(row.usage, name):,.{'1' if name == 'audio_seconds' else '0'}f}" for name in counted]
        cells.append((*where, *numbers, Bar(max(most, 1), 0, _tokens(row), color="cyan")))
    names_of_counts = [name.replace("seconds", "s").replace("_", " ") for name in counted]
    drawn = table((*places, *names_of_counts, "tokens"), cells)
    for column in drawn.columns[len(places) : -1]:
        column.justify = "right"
    drawn.columns[-1].min_width, drawn.columns[-1].max_width = 12, 40
    if not {"hour", "day"} & set(group_by):
        return [drawn]
    step = timedelta(hours=1) if "hour" in group_by else timedelta(days=1)
    counts = [(row.start, row.usage.requests, _tokens(row)) for row in rows if row.start is not None]
    width = Console().width if sys.stdout.isatty() else 160
    return [drawn, *charts(counts, span, step, width=width)]


def _place(row: UsageRow, group: GroupBy, names: dict[str, str]) -> str:
    if group == "key":
        return f"{row.key} {names.get(row.key or '', '(deleted)')}".rstrip()
    if group in {"hour", "day"}:
        return "" if row.start is None else row.start.strftime("%Y-%m-%d %H:00" if group == "hour" else "%Y-%m-%d")
    return str(getattr(row, group))


def _tokens(row: UsageRow) -> int:
    return row.usage.prompt_tokens + row.usage.completion_tokens


def charts(
    counts: Sequence[tuple[datetime, int, int]], span: tuple[datetime, datetime], step: timedelta, *, width: int
) -> list[Text]:
    """Draw (start, requests, tokens) of every `step` within `span`; steps without counts are empty.

    Where there are more steps than columns, neighbours are added up.
    """
    first = min(span[0].replace(minute=0, second=0, microsecond=0), *(start for start, _, _ in counts))
    if step.days:
        first = first.replace(hour=0)
    steps = max(1, -((first - span[1]) // step))
    columns = max(1, min(steps, width - _LABEL_WIDTH - 20))
    requests, tokens = [0] * columns, [0] * columns
    for start, some_requests, some_tokens in counts:
        column = min((start - first) // step * columns // steps, columns - 1)
        requests[column] += some_requests
        tokens[column] += some_tokens
    shown = "%m-%d" if step.days else "%m-%d %H:00"
    ends = (first.strftime(shown), (first + (steps - 1) * step).strftime(shown))
    if columns > sum(map(len, ends)):
        axis = ends[0] + ends[1].rjust(columns - len(ends[0]))
    else:
        axis = " to ".join(dict.fromkeys(ends))
    return [_line("requests", requests), _line("tokens", tokens), Text(" " * _LABEL_WIDTH + axis, style="dim")]


def _line(name: str, values: Sequence[int]) -> Text:
    most = max(values)
    marks = "".join(" " if not value else _LEVELS[(value * len(_LEVELS) - 1) // most] for value in values)
    return Text.assemble(name.ljust(_LABEL_WIDTH), (marks, "cyan"), f"  most: {most:,}", no_wrap=True)


def audit(
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rows.")] = 50,
    since: Annotated[str | None, typer.Option(help="Start: 7d (also m, h, w), 2026-11-21.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed keys and configuration, newest first."""
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
    typer.echo(f"To restore it: stop the server, then {HEARTH} restore {path}")


def restore(
    file: Annotated[Path, typer.Argument(help="A file written by `hearth backup`.")], *, data_dir: DataDir = None
) -> None:
    """Replace the database with a backup; the old one is moved aside. Refused while a server runs.

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
            f"as its user, number {folder.stat().st_uid}: sudo -u '#{folder.stat().st_uid}' {HEARTH} restore ..."
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
    typer.echo(f"{url.database} is now a copy of {file}: {keys} keys, schema {version}, sound, mode 600.")
    typer.echo("Keys that were revoked since that backup work again: revoke them again. Then start the server.")


def _detail_text(entry: AuditEntry) -> str:
    """Format the detail of an entry; in a change, two values are the old one and the new one."""
    parts = []
    for name, value in entry.detail.items():
        if entry.action in {"key.update", "key.expire"} and isinstance(value, list) and len(value) == 2:
            parts.append(f"{name} {_value(value[0])} -> {_value(value[1])}")
        elif value is not None:
            parts.append(f"{name} {_value(value)}")
    return ", ".join(parts)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""`hearth requests`: what the running server has refused lately."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from server.cli.options import AsJson, DataDir, read_time, tell
from server.instance import no_server
from server.observability.moments import moment, past
from server.observability.status import Refusal, ask_refusals
from server.settings import load_settings
from server.terminal import table

_COLUMNS = ("time (UTC)", "status", "error", "field or limit", "request", "model", "key", "x-request-id")


def requests(
    *,
    refused: Annotated[  # noqa: ARG001  # over HTTP it has to be said
        bool, typer.Option("--refused", help="The default: no others are kept.")
    ] = True,
    since: Annotated[str, typer.Option(help="Start: 1h (also m, d, w), 2026-11-21.")] = "1h",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number, newest first.")] = 100,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the latest requests that were refused or failed.

    The server keeps the last 1,000, until it is restarted; logs/access.jsonl has a line for each request.
    `path` and `field` are the only words of clients in it: the path escaped and cut, the field if it is one of ours.
    `model` may be one that the key may not use.
    """
    start = read_time("--since", since, past, datetime.now(UTC))
    folder = load_settings(data_dir=data_dir).data_dir
    found = ask_refusals(folder)
    if found is None:
        raise no_server(folder)
    shown = [one for one in found.data if moment(one.at) >= start][:limit]
    nothing = (
        f"Nothing was refused since {start:%Y-%m-%d %H:%M} UTC, or since the server's start if that was later. "
        f"Of before, {folder / 'logs'}/access.jsonl knows."
    )
    tell(
        {"data": [one.model_dump() for one in shown]},
        table(_COLUMNS, map(_row, shown)) if shown else nothing,
        as_json=as_json,
    )


def _row(one: Refusal) -> tuple[str, ...]:
    request = f"{one.method} {one.route or one.path or ''}"
    known = (one.error_code, one.param, request, one.model, one.key, one.request_id)
    return (one.at.removesuffix("Z").replace("T", " "), str(one.status), *(text or "-" for text in known))

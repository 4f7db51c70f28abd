"""`hearth keys`: create, list and show API keys on the machine that serves, straight in its database.

The verbs that change a key are key_changes.py's; they become commands here.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from server.cli.key_changes import expire, revoke, rotate, update
from server.cli.key_fields import (
    BatchItems,
    ImagesPerDay,
    ParallelRequests,
    RequestsPerMinute,
    TokensPerMinute,
    checked_rights,
    day,
    limits_given,
    scopes_of,
    show_text,
    state,
    written,
)
from server.cli.key_limits import OWN, limit_rows, sentence, short, tiers_of, with_limits
from server.cli.options import (
    AsJson,
    DataDir,
    Models,
    config_for,
    in_store,
    key_named,
    print_json,
    read_time,
    settings_for,
)
from server.moments import future
from server.store import DEFAULT_SCOPES, SCOPES, ApiKey, Database, KeyLimits, KeyStore
from server.store.api_key import utc_now
from server.terminal import HEARTH, print_rich

_CREATED = (
    *("public_id", "name", "tier", "scopes", "models", "expires_at", "created_at", "notes", "limits"),
    "effective_limits",
)

# Locals in a traceback would show a key
app = typer.Typer(
    help="Make, show, change and end API keys.", no_args_is_help=True, pretty_exceptions_show_locals=False
)


for verb in (update, rotate, expire, revoke):
    app.command()(verb)


@app.callback()
def flags(context: typer.Context, data_dir: DataDir = None, models: Models = None) -> None:
    """Make, show, change and end API keys. A server started with these flags needs them here too."""
    context.obj = {"data_dir": data_dir, "models": models}


@app.command()
def create(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    *,
    name: Annotated[str, typer.Option(help="Whose key it is, or what for: 1 to 64 characters.")],
    tier: Annotated[str, typer.Option(help="A tier of models.yaml; it decides models and limits.")],
    scope: Annotated[
        list[str] | None, typer.Option(help=f"What it may do: {', '.join(SCOPES)}. Default: all but metrics and admin.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only these models. Default: all of the tier.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="90d (also m, h, w), or the last day in UTC: 2027-01-31. Default: never.")
    ] = None,
    notes: Annotated[str, typer.Option(help="Anything worth knowing about it.")] = "",
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    parallel_requests: ParallelRequests = None,
    batch_items: BatchItems = None,
    images_per_day: ImagesPerDay = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is shown once."""
    settings = settings_for(**context.obj)
    config = config_for(settings)
    tiers = config.tiers
    checked_rights(config, tier, model or (), scope or ())
    expires_at = None if expires is None else read_time("--expires", expires, future, utc_now())
    limits = KeyLimits(
        **limits_given(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            parallel_requests=parallel_requests,
            batch_items=batch_items,
            images_per_day=images_per_day,
        )
    )

    async def make(database: Database) -> tuple[str, ApiKey]:
        store = KeyStore(database)
        scopes = scope or DEFAULT_SCOPES
        return await store.create(name, tier, scopes, model or None, expires_at, notes=notes, limits=limits)

    text, key = in_store(settings, make, make_store=True)
    if as_json:
        all_of_it = with_limits(key, tiers)
        print_json({"key": text, **{field: all_of_it[field] for field in _CREATED}})
        return
    until = f"until {written(key.expires_at)}" if key.expires_at else "without an end date"
    typer.echo(f"Key {key.public_id} for {key.name}: tier {key.tier}, {', '.join(scopes_of(key))}, {until}.")
    typer.echo(f"{sentence(key, tiers)}\n")
    show_text(text)


@app.command("list")
def list_keys(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List all keys, by their public ids, with the limits that hold for them."""
    settings = settings_for(**context.obj)
    keys = in_store(settings, lambda database: KeyStore(database).list())
    tiers = tiers_of(settings)
    if as_json:
        print_json({"keys": [with_limits(key, tiers) for key in keys]})
        return
    if not keys:
        typer.echo(f"No keys yet. Create one: {HEARTH} keys create --name NAME --tier TIER")
        return
    table = Table("id", "name", "tier", "scopes", "models", "limits", "state", "last used", box=box.SIMPLE)
    for key in keys:
        scopes = "default" if key.scopes == frozenset(DEFAULT_SCOPES) else ", ".join(scopes_of(key))
        models = "all" if key.models is None else ", ".join(key.models)
        limits = short(key, tiers)
        cells = (key.public_id, key.name, key.tier, scopes, models, limits, state(key), day(key.last_used_at))
        # Text, because a name like [red] is a name and no markup
        table.add_row(*map(Text, cells))
    print_rich(table)
    if any(OWN in short(key, tiers) for key in keys):
        typer.echo(f"  {OWN} the key's own limit; the others are its tier's")


@app.command()
def show(
    context: typer.Context,
    public_id: Annotated[str, typer.Argument(help="The id of the key, as `hearth keys list` shows it.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show everything about one key, with the limits that hold for it. Its text is kept nowhere."""
    settings, named = settings_for(**context.obj), key_named(public_id)
    key = in_store(settings, lambda database: KeyStore(database).find(named))
    tiers = tiers_of(settings)
    if as_json:
        print_json(with_limits(key, tiers))
        return
    table = Table(box=box.SIMPLE, show_header=False)
    rows = {
        "id": key.public_id,
        "name": key.name,
        "state": state(key) + (f", replaced by {key.replaced_by}" if key.replaced_by else ""),
        "tier": key.tier,
        "scopes": ", ".join(scopes_of(key)),
        "models": "all of its tier" if key.models is None else ", ".join(key.models),
        "created": written(key.created_at),
        "last used": written(key.last_used_at),
        "ends": written(key.expires_at),
        "notes": key.notes or "none",
    }
    rows |= limit_rows(key, tiers)
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    print_rich(table)

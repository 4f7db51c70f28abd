"""`hearth keys`: create, list and show API keys on the machine that serves, straight in its database.

The verbs that change a key are cli_key_changes.py's; they become commands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from server.cli_key_changes import expire, revoke, rotate, update
from server.cli_key_fields import (
    BatchItems,
    ImagesPerDay,
    ParallelRequests,
    RequestsPerMinute,
    TokensPerMinute,
    checked_rights,
    day,
    described,
    limits_given,
    scopes_of,
    show_text,
    state,
    written,
)
from server.cli_store import (
    AsJson,
    DataDir,
    Models,
    config_for,
    in_store,
    key_named,
    print_json,
    print_rich,
    read_time,
    settings_for,
)
from server.limits import limits_of
from server.moments import future
from server.store import DEFAULT_SCOPES, SCOPES, ApiKey, Database, KeyLimits, KeyStore
from server.store.api_key import LIMITS, utc_now
from server.store.key_format import PUBLIC_ID_LENGTH

if TYPE_CHECKING:
    from engine import TierSpec

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
        list[str] | None, typer.Option(help=f"What it may do: {', '.join(SCOPES)}. Default: all but admin.")
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
    checked_rights(config_for(settings), tier, model or (), scope or ())
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
        fields = ("public_id", "name", "tier", "scopes", "models", "expires_at", "created_at", "notes", "limits")
        all_of_it = described(key)
        print_json({"key": text, **{field: all_of_it[field] for field in fields}})
        return
    until = f"until {written(key.expires_at)}" if key.expires_at else "without an end date"
    typer.echo(f"Key {key.public_id} for {key.name}: tier {key.tier}, {', '.join(scopes_of(key))}, {until}.\n")
    show_text(text)


@app.command("list")
def list_keys(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List all keys, by their public ids."""
    keys = in_store(settings_for(**context.obj), lambda database: KeyStore(database).list())
    if as_json:
        print_json({"keys": [described(key) for key in keys]})
        return
    if not keys:
        typer.echo("No keys yet. Create one: hearth keys create --name NAME --tier TIER")
        return
    table = Table("id", "name", "tier", "scopes", "models", "state", "last used", box=box.SIMPLE)
    table.columns[0].min_width = PUBLIC_ID_LENGTH  # however narrow the terminal: the other verbs want it whole
    for key in keys:
        scopes = "all but admin" if key.scopes == frozenset(DEFAULT_SCOPES) else ", ".join(scopes_of(key))
        models = "all" if key.models is None else ", ".join(key.models)
        cells = (key.public_id, key.name, key.tier, scopes, models, state(key), day(key.last_used_at))
        # Text, because a name like [red] is a name and no markup
        table.add_row(*map(Text, cells))
    print_rich(table)


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
    if as_json:
        print_json(described(key))
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
    rows |= _limits(key, config_for(settings).tiers.get(key.tier))
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    print_rich(table)


def _limits(key: ApiKey, tier: TierSpec | None) -> dict[str, str]:
    effective, shown = limits_of(key, tier), {}
    for name in LIMITS:
        limit = getattr(effective, name)
        whose = "its tier's" if getattr(key.limits, name) is None else "its own"
        shown[name.replace("_", " ")] = f"no limit ({whose})" if limit is None else f"{limit} ({whose})"
    return shown

"""`hearth keys`: create, list and revoke API keys on the machine that serves, straight in its database.

Words, tables and exit codes (1: the database refuses, 2: a wrong argument) are its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from datetime import UTC, datetime, time, timedelta
from difflib import get_close_matches
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.config import load_config
from engine.errors import EngineError
from server.settings import SettingsError, load_settings
from server.store import (
    DEFAULT_SCOPES,
    SCOPES,
    ApiKey,
    Database,
    KeyFieldError,
    KeyNotFoundError,
    KeyStore,
    StoreError,
    sqlite_url,
)
from server.store.database import FILE_NAME
from server.store.key_format import PUBLIC_ID_LENGTH, public_id_in
from server.store.keys import utc_now

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from server.settings import Settings

T = TypeVar("T")

# Locals in a traceback would show a key
app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True, pretty_exceptions_show_locals=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.callback()
def flags(
    context: typer.Context,
    data_dir: Annotated[Path | None, typer.Option(help="Where the server keeps its keys [HEARTH_DATA_DIR].")] = None,
    models: Annotated[Path | None, typer.Option(help="The server's models.yaml [HEARTH_MODELS].")] = None,
) -> None:
    """Create, list and revoke API keys. A server started with these flags needs them here too."""
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
        str | None, typer.Option(help="90d (also h, w), or the last day in UTC: 2027-01-31. Default: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is shown once."""
    settings = _settings(context)
    _check_names(settings, tier, scope or (), model or ())
    expires_at = None if expires is None else _expiry(expires)

    async def make(store: KeyStore) -> tuple[str, ApiKey]:
        return await store.create(name, tier, scope or DEFAULT_SCOPES, model or None, expires_at)

    text, key = _run(settings, make, make_store=True)
    if as_json:
        fields = ("public_id", "name", "tier", "scopes", "models", "expires_at", "created_at")
        described = _described(key)
        _print_json({"key": text, **{field: described[field] for field in fields}})
        return
    until = f"until {key.expires_at:%Y-%m-%d %H:%M} UTC" if key.expires_at else "without an end date"
    typer.echo(f"Key {key.public_id} for {key.name}: tier {key.tier}, {', '.join(_scopes(key))}, {until}.\n")
    # Plain and alone, so that a double click, a pipe or a narrow terminal gives the whole of it
    typer.echo(text)
    typer.echo("\nShown once: copy it now. Only a hash of it is kept.")


@app.command("list")
def list_keys(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List all keys, by their public ids."""
    keys = _run(_settings(context), lambda store: store.list())
    if as_json:
        _print_json({"keys": [_described(key) for key in keys]})
        return
    if not keys:
        typer.echo("No keys yet. Create one: hearth keys create --name NAME --tier TIER")
        return
    table = Table("id", "name", "tier", "scopes", "models", "state", "last used", box=box.SIMPLE)
    table.columns[0].min_width = PUBLIC_ID_LENGTH  # however narrow the terminal: `revoke` wants it whole
    for key in keys:
        scopes = "all but admin" if key.scopes == frozenset(DEFAULT_SCOPES) else ", ".join(_scopes(key))
        models = "all" if key.models is None else ", ".join(key.models)
        cells = (key.public_id, key.name, key.tier, scopes, models, _state(key), _day(key.last_used_at))
        # Text, because a name like [red] is a name and no markup
        table.add_row(*map(Text, cells))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@app.command()
def revoke(
    context: typer.Context,
    public_id: Annotated[str, typer.Argument(help="The id of the key, as `hearth keys list` shows it.")],
    *,
    as_json: AsJson = False,
) -> None:
    """End a key for good. It stops working within 10 seconds."""
    named = public_id_in(public_id)
    if named is None:
        # What was typed is not repeated: it may be part of a secret
        _refuse("That is no key id. An id is 12 letters and digits; `hearth keys list` shows them.")
    key = _run(_settings(context), lambda store: store.revoke(named))
    if as_json:
        _print_json(_described(key))
        return
    typer.echo(f"Key {key.public_id} ({key.name}) is revoked since {key.revoked_at:%Y-%m-%d %H:%M} UTC.")
    typer.echo("A running server refuses it within 10 seconds.")


def _settings(context: typer.Context) -> Settings:
    try:
        return load_settings(**context.obj)
    except SettingsError as error:
        _refuse(str(error))


def _run(settings: Settings, work: Callable[[KeyStore], Awaitable[T]], *, make_store: bool = False) -> T:
    file = settings.data_dir / FILE_NAME
    if not make_store and not file.exists():
        _refuse(
            f"There is no key store in {settings.data_dir}. Pick one: 1. make the first key: hearth keys create; "
            "2. name the server's data directory: hearth keys --data-dir ..., or HEARTH_DATA_DIR.",
            code=1,
        )

    async def opened() -> T:
        async with await Database.open(sqlite_url(file)) as database:
            return await work(KeyStore(database))

    try:
        return asyncio.run(opened())
    except (KeyFieldError, KeyNotFoundError) as error:
        _refuse(error.message)
    except StoreError as error:
        _refuse(error.message, code=1)


def _check_names(settings: Settings, tier: str, scopes: Iterable[str], models: Iterable[str]) -> None:
    try:
        config = load_config(settings.models)
    except EngineError as error:
        _refuse(error.message, code=1)
    _check_known("tier", tier, config.tiers)
    for scope in scopes:
        _check_known("scope", scope, SCOPES)
    for model in models:
        _check_known("model", model, config.models)
        needed = config.models[model].tier
        if needed not in config.tiers[tier].models:
            _refuse(f"Keys of tier {tier!r} may not use the model {model!r}: it is for tier {needed!r}.")


def _check_known(kind: str, given: str, known: Iterable[str]) -> None:
    names = list(known)
    if given in names:
        return
    near = get_close_matches(given, names, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    _refuse(f"There is no {kind} {given!r}.{meant} Known: {', '.join(names)}.")


def _expiry(given: str) -> datetime:
    units = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
    try:
        if span := re.fullmatch(r"([0-9]{1,6})([hdw])", given):
            return utc_now() + int(span[1]) * units[span[2]]
        day = datetime.strptime(given, "%Y-%m-%d").replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        _refuse(f"--expires {given!r} is neither a time span like 90d, 12h or 4w nor a date like 2027-01-31.")
    return datetime.combine(day, time(23, 59, 59), UTC)  # the key works through the day that was named


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    return f"{'until' if key.usable_at(utc_now()) else 'expired'} {_day(key.expires_at)}"


def _scopes(key: ApiKey) -> list[str]:
    return [scope for scope in SCOPES if scope in key.scopes]


def _described(key: ApiKey) -> dict[str, Any]:
    return {
        "public_id": key.public_id,
        "name": key.name,
        "tier": key.tier,
        "scopes": _scopes(key),
        "models": None if key.models is None else list(key.models),
        "created_at": _iso(key.created_at),
        "expires_at": _iso(key.expires_at),
        "revoked_at": _iso(key.revoked_at),
        "last_used_at": _iso(key.last_used_at),
    }


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _day(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d}"


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _refuse(message: str, *, code: int = 2) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)

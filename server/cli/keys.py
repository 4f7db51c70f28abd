"""`hearth keys`: makes, shows, changes and ends API keys on the machine that serves, directly in its database."""

from __future__ import annotations

import csv
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from engine.config import Config, TierSpec, load_config
from engine.errors import EngineError
from server.api.admin.schema import Key, check_rights, working_admins
from server.cli.options import AsJson, Commands, DataDir, Models, T, in_store, missing_store, read_time, refuse, tell
from server.settings import Settings, load_settings
from server.store import KeyFieldError
from server.store.database import Database
from server.store.keys import DEFAULT_SCOPES, LIMITS, SCOPES, ApiKey, KeyLimits, KeyStore, plan_key, public_id_in
from server.store.schema import utc_now
from server.terminal import HEARTH, table
from server.validation import MomentError, future, span

_CREATED = ("public_id", "name", "tier", "scopes", "models", "expires_at", "created_at", "notes", "limits")
_CSV_COLUMNS = ("name", "tier", "scopes", "models", "expires", "notes", *LIMITS)
_ALL_ONCE = "\nShown once: copy them now. Only hashes of them are kept."
_ONCE = "\nShown once: copy it now. Only a hash of it is kept."
_SOON = "Takes effect on running servers within 10 seconds."
_LIMIT_WORDS = dict(zip(LIMITS, ("requests/min", "tokens/min", "parallel", "batch items", "images/day"), strict=True))
_OWN = "*"
_NEW_ADMIN = "keys create --name admin --tier standard --scope chat --scope admin"

_COLUMNS = ("id", "name", "tier", "scopes", "models", "limits", "state", "last used")

Tiers = Mapping[str, TierSpec]
Data = dict[str, Any]
"""A key for JSON, with its own `limits` and those that hold, `effective_limits`: None where tiers are not known."""


def _limit(what: str) -> Any:
    return typer.Option(metavar="N|none", help=f"{what}. Overrides the tier's limit; `none`: the tier's limit.")


Named = Annotated[str, typer.Argument(metavar="ID|NAME", help="The id of the key, or its name if no other has it.")]
RequestsPerMinute = Annotated[str | None, _limit("Requests per minute")]
TokensPerMinute = Annotated[str | None, _limit("Tokens of prompts and answers per minute")]
ParallelRequests = Annotated[str | None, _limit("Requests in parallel")]
BatchItems = Annotated[str | None, _limit("Items in one batch")]
ImagesPerDay = Annotated[str | None, _limit("Images per day (UTC)")]

# Locals in a traceback would show a key
app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def flags(context: typer.Context, data_dir: DataDir = None, models: Models = None) -> None:
    """Create, show, change and revoke API keys.

    A server started with --data-dir or --models needs them here, before the command: hearth keys --data-dir DIR list
    """
    context.obj = {"data_dir": data_dir, "models": models}


@app.command()
def create(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Option(help="Whose key it is, or what it is for: 1 to 64 characters.")] = None,
    tier: Annotated[str | None, typer.Option(help="A tier of models.yaml; it decides models and limits.")] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE.csv", help="Make a key for each row; columns: name, tier, other options."),
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help=f"Its scopes: {', '.join(SCOPES)}. Default: all but metrics and admin.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only these models. Default: all of the tier.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="90d (also m, h, w), or the last day in UTC: 2027-01-31. Default: never.")
    ] = None,
    notes: Annotated[str, typer.Option(help="Notes for administrators.")] = "",
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    parallel_requests: ParallelRequests = None,
    batch_items: BatchItems = None,
    images_per_day: ImagesPerDay = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. It is shown once. --scope and --model may be repeated. With --from, all keys of a file or none."""
    settings = load_settings(**context.obj)
    config = load_config(settings.models)
    if from_ is not None:
        given = {option.name for option in context.command.params if option.name and context.params.get(option.name)}
        if given - {"from_", "as_json"}:
            refuse("With --from the file says everything: give no other option but --json.")
        _create_all(settings, config, from_, as_json=as_json)
        return
    if name is None or tier is None:
        refuse("Give --name and --tier, or --from with a file that has both for each key.")
    check_rights(config, tier, model or ())
    expires_at = None if expires is None else read_time("--expires", expires, future, utc_now())
    own = _limits_given(requests_per_minute, tokens_per_minute, parallel_requests, batch_items, images_per_day)
    rights = (tier, scope or DEFAULT_SCOPES, model or None, expires_at)
    planned = plan_key(name, *rights, now=utc_now(), notes=notes, limits=KeyLimits(**own))
    note = _on_new_database(settings)
    ((text, key),) = in_store(settings, lambda database: KeyStore(database).create_all([planned]), make_store=True)
    data = _data(key, config.tiers)
    until = f"until {_minute(key.expires_at)}" if key.expires_at else "without an end date"
    tell(
        {"key": text, **{field: data[field] for field in (*_CREATED, "effective_limits")}},
        f"Key {key.public_id} for {key.name}: tier {key.tier}, {', '.join(data['scopes'])}, {until}.",
        f"{_sentence(data)}\n",
        text,
        _ONCE,
        *note,
        as_json=as_json,
    )


def _on_new_database(settings: Settings) -> list[str]:
    """Say that `create` makes a database, if it will: a running server may have another one."""
    if (file := missing_store(settings)) is None:
        return []
    other = f"A server with another data directory does not know it: name that with {HEARTH} keys --data-dir DIR."
    return [f"{file} is a new key database. {other}"]


def _create_all(settings: Settings, config: Config, file: Path, *, as_json: bool) -> None:
    """Make a key of each row of a CSV file. If a row is wrong none is made, and every wrong row is named."""
    planned = _planned(config, file)
    note = _on_new_database(settings)
    made = in_store(settings, lambda database: KeyStore(database).create_all(planned), make_store=True)
    data = [{"key": text, **_data(key, config.tiers)} for text, key in made]
    rows = [(key.public_id, key.name, key.tier, _minute(key.expires_at), text) for text, key in made]
    shown = {"keys": [{name: one[name] for name in ("key", *_CREATED, "effective_limits")} for one in data]}
    tell(shown, table(("id", "name", "tier", "until", "key"), rows), _ALL_ONCE, *note, as_json=as_json)


def _planned(config: Config, file: Path) -> list[ApiKey]:
    """Read and check the rows, or end with every line that is wrong."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        refuse(f"{file} cannot be read as CSV in UTF-8: {error}", code=1)
    if wrong := [column for column in columns if column not in _CSV_COLUMNS]:
        refuse(
            f"{file} has unknown columns: {', '.join(map(repr, wrong))}. Known, separated by commas: "
            f"{', '.join(_CSV_COLUMNS)}."
        )
    if missing := {"name", "tier"} - {*columns}:
        refuse(f"{file} has no column {' and none '.join(sorted(missing))}. Its first line names the columns.")
    planned, problems = [], []
    for line, row in rows:
        try:
            planned.append(_planned_row(config, row))
        except (KeyFieldError, MomentError) as error:
            problems.append(f"  line {line}: {error}")
    if problems:
        refuse(f"{file} was refused, and no key was created:\n" + "\n".join(problems))
    if not planned:
        refuse(f"{file} has no row below its first line, which names the columns.")
    return planned


def _planned_row(config: Config, row: Mapping[str | None, Any]) -> ApiKey:
    """Raises `KeyFieldError` and `MomentError`."""
    if None in row or None in row.values():
        raise KeyFieldError("row", "It has more or fewer fields than the first line has columns.")
    text = {str(name): str(value).strip() for name, value in row.items()}
    scopes, models = (text.get(name, "").split() or None for name in ("scopes", "models"))
    check_rights(config, text["tier"], models or ())
    expires = text.get("expires")
    try:
        expires_at = future(expires, utc_now()) if expires else None
    except MomentError as error:
        raise MomentError(f"`expires` {error}.") from None
    own = {name: _limit_given(name, text[name]) for name in LIMITS if text.get(name)}
    rights = (text["tier"], scopes or DEFAULT_SCOPES, models, expires_at)
    return plan_key(text["name"], *rights, now=utc_now(), notes=text.get("notes", ""), limits=KeyLimits(**own))


@app.command("list")
def list_keys(
    context: typer.Context,
    *,
    active: Annotated[bool, typer.Option("--active", help="Only keys that work now.")] = False,
    as_json: AsJson = False,
) -> None:
    """List all keys, by their public ids, with the limits that hold for them."""
    settings = load_settings(**context.obj)
    keys = in_store(settings, lambda database: KeyStore(database).list())
    if active:
        keys = [key for key in keys if key.usable_at(utc_now())]
    tiers = _tiers(settings)
    listed = [_data(key, tiers) for key in keys]
    lines: list[RenderableType] = [
        f"{'No key works now' if active else 'No keys yet'}. Create one: {HEARTH} keys create --name NAME --tier TIER"
    ]
    if keys:
        lines = [table(_COLUMNS, map(_row, keys, listed))]
    if any(_OWN in _short(data) for data in listed):
        lines.append(f"  {_OWN} the key's own limit; the others are its tier's")
    tell({"keys": listed}, *lines, as_json=as_json)


def _row(key: ApiKey, data: Data) -> tuple[str, ...]:
    scopes = "default" if key.scopes == frozenset(DEFAULT_SCOPES) else ", ".join(data["scopes"])
    models = "all" if key.models is None else ", ".join(key.models)
    return (key.public_id, key.name, key.tier, scopes, models, _short(data), _state(key), _day(key.last_used_at))


@app.command()
def show(context: typer.Context, key_or_name: Named, *, as_json: AsJson = False) -> None:
    """Show everything about one key, with the limits that hold for it. The secret cannot be shown again."""
    settings = load_settings(**context.obj)
    key = _on_key(settings, key_or_name, KeyStore.find)
    data = _data(key, _tiers(settings))
    rows = {
        "id": key.public_id,
        "name": key.name,
        "state": _state(key),
        "tier": key.tier,
        "scopes": ", ".join(data["scopes"]),
        "models": "all of its tier" if key.models is None else ", ".join(key.models),
        "created": _minute(key.created_at),
        "last used": _minute(key.last_used_at),
        "ends": _minute(key.expires_at),
        "notes": key.notes or "none",
    }
    shown = table(("", ""), (rows | _limit_rows(data)).items())
    shown.show_header = False
    tell(data, shown, as_json=as_json)


@app.command()
def update(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    key_or_name: Named,
    *,
    name: Annotated[str | None, typer.Option(help="Whose key it is, or what it is for.")] = None,
    tier: Annotated[str | None, typer.Option(help="A tier of models.yaml.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help=f"Its scopes from now on: {', '.join(SCOPES)}.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="All models that it may use from now on.")] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may use all models of its tier.")] = False,
    notes: Annotated[str | None, typer.Option(help="Replaces the notes.")] = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    parallel_requests: ParallelRequests = None,
    batch_items: BatchItems = None,
    images_per_day: ImagesPerDay = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields; the rest stays. --scope and --model may be repeated."""
    if model and all_models:
        refuse("--model and --all-models exclude each other. Give one of them.")
    given = {"name": name, "tier": tier, "scopes": scope or None, "models": model or None, "notes": notes}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    changes |= {"models": None} if all_models else {}
    changes |= _limits_given(requests_per_minute, tokens_per_minute, parallel_requests, batch_items, images_per_day)
    if not changes:
        refuse(f"Nothing to change. Name what is to be different; see {HEARTH} keys update --help.")
    settings = load_settings(**context.obj)

    async def change(store: KeyStore, public_id: str) -> ApiKey:
        old = await store.find(public_id)
        if changes.keys() & {"tier", "models"}:
            config, models = load_config(settings.models), changes.get("models", old.models)
            check_rights(config, changes.get("tier", old.tier), models or (), had=old.models or ())
        return await store.update(public_id, **changes)

    key = _on_key(settings, key_or_name, change)
    data = _data(key, _tiers(settings))
    changed = f"Key {key.public_id} ({key.name}) is changed: {', '.join(changes)}."
    tell(data, changed, _sentence(data), _SOON, as_json=as_json)


@app.command()
def rotate(
    context: typer.Context,
    key_or_name: Named,
    *,
    overlap: Annotated[str, typer.Option(help="How long the old key still works: 24h (also m, d, w), or 0h.")] = "24h",
    expires: Annotated[
        str | None, typer.Option(help="When the new one ends, as for create. Default: the old one's lifetime.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a successor with the same rights and limits. It is shown once; the old key keeps working for --overlap."""
    overlap_span = read_time("--overlap", overlap, lambda text, _now: span(text), utc_now())
    expires_at = None if expires is None else read_time("--expires", expires, future, utc_now())

    async def work(store: KeyStore, public_id: str) -> tuple[str, ApiKey, ApiKey]:
        return *await store.rotate(public_id, overlap_span, expires_at=expires_at), await store.find(public_id)

    settings = load_settings(**context.obj)
    text, new, old = _on_key(settings, key_or_name, work)
    tell(
        {"key": text, **_data(new, _tiers(settings)), "replaces": old.public_id},
        f"Key {new.public_id} replaces {old.public_id} ({old.name}), which works until {_minute(old.expires_at)}."
        f" The new one {f'works until {_minute(new.expires_at)}' if new.expires_at else 'has no end'}.\n",
        text,
        _ONCE,
        as_json=as_json,
    )


@app.command()
def expire(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    key_or_name: Named,
    *,
    at: Annotated[str | None, typer.Option(help="The last day in UTC, 2027-01-31, or a moment.")] = None,
    in_: Annotated[str | None, typer.Option("--in", help="Duration from now: 12h, 90d, 4w.")] = None,
    never: Annotated[bool, typer.Option("--never", help="It never expires.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set or remove the end of a key. An expired key works again with a later end."""
    if sum((at is not None, in_ is not None, never)) != 1:
        refuse(f"Give its end: one of --at 2027-01-31, --in 90d, --never. To end it now: {HEARTH} keys revoke.")
    option, given = ("--in", in_) if at is None else ("--at", at)
    end = None if given is None else read_time(option, given, future, utc_now())
    settings = load_settings(**context.obj)
    key = _on_key(settings, key_or_name, lambda store, public_id: store.expire(public_id, end))
    ends = f"works until {_minute(end)}" if end else "has no end"
    tell(_data(key, _tiers(settings)), f"Key {key.public_id} ({key.name}) {ends}.", _SOON, as_json=as_json)


@app.command()
def revoke(context: typer.Context, key_or_name: Named, *, as_json: AsJson = False) -> None:
    """End a key for good. It stops working within 10 seconds."""

    async def work(store: KeyStore, public_id: str) -> tuple[ApiKey, list[ApiKey]]:
        keys = await store.list()
        return await store.revoke(public_id), keys

    settings = load_settings(**context.obj)
    key, keys = _on_key(settings, key_or_name, work)
    revoked = f"Key {key.public_id} ({key.name}) is revoked since {_minute(key.revoked_at)}."
    lines = [revoked, "A running server refuses it within 10 seconds."]
    if "admin" in key.scopes and set(working_admins(keys, utc_now())) <= {key.public_id}:
        lines.append(f"No admin key is left. Create one: {HEARTH} {_NEW_ADMIN}")
    tell(_data(key, _tiers(settings)), *lines, as_json=as_json)


def _on_key(settings: Settings, given: str, work: Callable[[KeyStore, str], Awaitable[T]]) -> T:
    """Run `work` on the store, with the id of the key that was typed; or end."""

    async def found(database: Database) -> T:
        store = KeyStore(database)
        return await work(store, await _id_of(given, store))

    return in_store(settings, found)


async def _id_of(given: str, store: KeyStore) -> str:
    """Return the id of the key that was typed: by its id, or by a name that no other has; or end.

    Revoked keys have their names as long as no other key has.
    """
    keys = await store.list()
    same = [key for key in keys if key.name == given]
    named = [key.public_id for key in same if key.revoked_at is None] or [key.public_id for key in same]
    if not named or public_id_in(given) in {key.public_id for key in keys}:
        unknown = f"No key has this name or id. `{HEARTH} keys list` shows ids and names."
        return public_id_in(given) or refuse(unknown)
    if len(named) > 1:
        refuse(f"{len(named)} keys have this name: {', '.join(named)}. Name one of them by its id.")
    return named[0]


def _limits_given(*options: str | None) -> dict[str, int | None]:
    """Return the limits that were named, by field, from options in the order of `LIMITS`; None is the tier's."""
    return {name: _limit_given(name, text) for name, text in zip(LIMITS, options, strict=True) if text is not None}


def _limit_given(name: str, text: str) -> int | None:
    """Read a limit; None is the tier's. Raises `KeyFieldError`."""
    if text != "none" and not (text.isascii() and text.isdigit() and len(text) <= 10):
        option = f"--{name.replace('_', '-')}"
        raise KeyFieldError(name, f"{option} {text!r} is neither a whole number nor none (its tier's limit).")
    return None if text == "none" else int(text)


def _tiers(settings: Settings) -> Tiers | None:
    """Read the tiers; None, with a line on stderr, where models.yaml cannot be read: keys are shown anyway."""
    try:
        return load_config(settings.models).tiers
    except EngineError as error:
        typer.echo(f"Limits of tiers are not shown: {error.message}", err=True)
        return None


def _data(key: ApiKey, tiers: Tiers | None) -> Data:
    """Return the key as over HTTP, and its effective limits by name, in which null is no limit."""
    limits = None if tiers is None else key.limits_in(tiers)
    effective = None if limits is None else {name: getattr(limits, name) for name in LIMITS}
    return Key.model_validate(key).model_dump() | {"effective_limits": effective}


def _limit_rows(data: Data) -> dict[str, str]:
    limits, rows = data["effective_limits"], {}
    for name, own in data["limits"].items():
        limit = own if limits is None else limits[name]
        number = str(limit) if limit is not None else "unknown" if limits is None else "no limit"
        rows[name.replace("_", " ")] = number + (" (its own)" if own is not None else " (its tier's)")
    return rows


def _short(data: Data) -> str:
    """Return the limits in a few words, like `30 requests/min*, 5 parallel`; the key's own have a star."""
    own, limits = data["limits"], data["effective_limits"]
    parts = [
        f"{limit} {_LIMIT_WORDS[name]}{'' if own[name] is None else _OWN}"
        for name, limit in (limits or own).items()
        if limit is not None
    ]
    return ", ".join(parts) or ("its tier's" if limits is None else "none")


def _sentence(data: Data) -> str:
    """Return the limits as a line, printed below what was done to the key."""
    short = _short(data)
    note = f" ({_OWN} its own; the others are its tier's)" if _OWN in short else ""
    return f"Limits: {short}.{note}"


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    successor = f", replaced by {key.replaced_by}" if key.replaced_by else ""
    return f"{'until' if key.usable_at(utc_now()) else 'expired'} {_day(key.expires_at)}{successor}"


def _day(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d}"


def _minute(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"

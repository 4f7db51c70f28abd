"""`hearth keys update`, `rotate`, `expire` and `revoke`: the verbs that change a key that there is.

keys.py makes commands of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.key_fields import (
    BatchItems,
    ImagesPerDay,
    ParallelRequests,
    RequestsPerMinute,
    TokensPerMinute,
    described,
    limits_given,
    show_text,
    written,
)
from server.cli.key_limits import sentence, tiers_of, with_limits
from server.cli.options import AsJson, config_for, in_store, key_named, print_json, read_time, refuse, settings_for
from server.key_rules import check_rights, check_scopes
from server.moments import MomentError, future, span
from server.store import SCOPES, ApiKey, Database, KeyStore
from server.store.api_key import utc_now
from server.terminal import HEARTH

if TYPE_CHECKING:
    from server.settings import Settings

Id = Annotated[str, typer.Argument(help="The id of the key, as `hearth keys list` shows it.")]
_SOON = "A running server goes by that within 10 seconds."


def update(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    public_id: Id,
    *,
    name: Annotated[str | None, typer.Option(help="Whose key it is, or what for.")] = None,
    tier: Annotated[str | None, typer.Option(help="A tier of models.yaml.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help=f"All it may do from now on: {', '.join(SCOPES)}.")] = None,
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
    """Change what is named, and leave the rest as it is."""
    if model and all_models:
        refuse("--model and --all-models exclude each other. Give one of them.")
    given = {"name": name, "tier": tier, "scopes": scope or None, "models": model or None, "notes": notes}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    changes |= {"models": None} if all_models else {}
    changes |= limits_given(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        parallel_requests=parallel_requests,
        batch_items=batch_items,
        images_per_day=images_per_day,
    )
    if not changes:
        refuse(f"Nothing to change. Name what is to be different; see {HEARTH} keys update --help.")
    settings, named = settings_for(**context.obj), key_named(public_id)
    key = in_store(settings, lambda database: _updated(database, settings, named, changes))
    tiers = tiers_of(settings)
    if as_json:
        print_json(with_limits(key, tiers))
        return
    typer.echo(f"Key {key.public_id} ({key.name}) is changed: {', '.join(changes)}.")
    typer.echo(f"{sentence(key, tiers)}\n{_SOON}")


async def _updated(database: Database, settings: Settings, public_id: str, changes: dict[str, Any]) -> ApiKey:
    store = KeyStore(database)
    old = await store.find(public_id)
    check_scopes(changes.get("scopes", ()))
    if changes.keys() & {"tier", "models"}:
        check_rights(config_for(settings), changes.get("tier", old.tier), changes.get("models", old.models) or ())
    return await store.update(public_id, **changes)


def rotate(
    context: typer.Context,
    public_id: Id,
    *,
    overlap: Annotated[str, typer.Option(help="How long the old key still works: 24h (also m, d, w), or 0h.")] = "24h",
    expires: Annotated[
        str | None, typer.Option(help="When the new one ends, as for create. Default: as long as the old was made for.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a successor with the same rights and limits. It is shown once; the old key works on for the overlap."""
    try:
        overlap_span = span(overlap)
    except MomentError as error:
        refuse(f"--overlap {overlap!r} {error}.")
    expires_at = None if expires is None else read_time("--expires", expires, future, utc_now())
    named = key_named(public_id)

    async def work(database: Database) -> tuple[str, ApiKey, ApiKey]:
        store = KeyStore(database)
        text, new = await store.rotate(named, overlap_span, expires_at=expires_at)
        return text, new, await store.find(named)

    text, new, old = in_store(settings_for(**context.obj), work)
    if as_json:
        print_json({"key": text, **described(new), "replaces": named})
        return
    typer.echo(
        f"Key {new.public_id} replaces {old.public_id} ({old.name}), which works until {written(old.expires_at)}.\n"
    )
    show_text(text)


def expire(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    public_id: Id,
    *,
    at: Annotated[str | None, typer.Option(help="The last day in UTC, 2027-01-31, or a moment.")] = None,
    in_: Annotated[str | None, typer.Option("--in", help="So long from now: 12h, 90d, 4w.")] = None,
    never: Annotated[bool, typer.Option("--never", help="It has no end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set when a key ends, or that it does not. A key that has expired works again with a later end."""
    if sum((at is not None, in_ is not None, never)) != 1:
        refuse(f"Say when it ends: one of --at 2027-01-31, --in 90d, --never. To end it now: {HEARTH} keys revoke.")
    given = at if at is not None else in_
    option = "--at" if at is not None else "--in"
    end = None if given is None else read_time(option, given, future, utc_now())
    named = key_named(public_id)
    key = in_store(settings_for(**context.obj), lambda database: KeyStore(database).expire(named, end))
    told = f"works until {written(end)}" if end else "has no end"
    if as_json:
        print_json(described(key))
        return
    typer.echo(f"Key {key.public_id} ({key.name}) {told}.\n{_SOON}")


def revoke(context: typer.Context, public_id: Id, *, as_json: AsJson = False) -> None:
    """End a key for good. It stops working within 10 seconds."""
    named = key_named(public_id)
    key = in_store(settings_for(**context.obj), lambda database: KeyStore(database).revoke(named))
    if as_json:
        print_json(described(key))
        return
    typer.echo(f"Key {key.public_id} ({key.name}) is revoked since {written(key.revoked_at)}.")
    typer.echo("A running server refuses it within 10 seconds.")

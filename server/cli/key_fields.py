"""The fields of a key on the command line: the options that several verbs have, and how they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.options import refuse
from server.key_rules import check_rights, check_scopes
from server.schemas.admin import Key
from server.store import SCOPES, KeyFieldError
from server.store.api_key import utc_now

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from engine import Config
    from server.store import ApiKey


def _limit(what: str) -> Any:
    return typer.Option(metavar="N|none", help=f"{what}, instead of its tier's limit; none: its tier's.")


RequestsPerMinute = Annotated[str | None, _limit("Requests in a minute")]
TokensPerMinute = Annotated[str | None, _limit("Tokens of prompts and answers in a minute")]
ParallelRequests = Annotated[str | None, _limit("Requests at the same time")]
BatchItems = Annotated[str | None, _limit("Items in one batch")]
ImagesPerDay = Annotated[str | None, _limit("Images in a day (UTC)")]


def limits_given(**options: str | None) -> dict[str, int | None]:
    """Return the limits that were named, by field; None is the tier's. Ends for what is no number."""
    limits: dict[str, int | None] = {}
    for name, text in options.items():
        if text is None:
            continue
        if text != "none" and not (text.isascii() and text.isdigit() and len(text) <= 10):
            refuse(f"--{name.replace('_', '-')} {text!r} is neither a whole number nor none (its tier's limit).")
        limits[name] = None if text == "none" else int(text)
    return limits


def checked_rights(config: Config, tier: str, models: Iterable[str], scopes: Iterable[str]) -> None:
    """End for a tier, model or scope that there is not, or a model that the tier may not use."""
    try:
        check_scopes(scopes)
        check_rights(config, tier, models)
    except KeyFieldError as error:
        refuse(error.message)


def described(key: ApiKey) -> dict[str, Any]:
    """Return the key for JSON, with the same names as over HTTP."""
    return Key.of(key).model_dump()


def state(key: ApiKey) -> str:
    """Say in a word or two whether it works."""
    if key.revoked_at is not None:
        return f"revoked {day(key.revoked_at)}"
    if key.expires_at is None:
        return "active"
    return f"{'until' if key.usable_at(utc_now()) else 'expired'} {day(key.expires_at)}"


def scopes_of(key: ApiKey) -> list[str]:
    """Return its scopes in their usual order."""
    return [scope for scope in SCOPES if scope in key.scopes]


def day(at: datetime | None) -> str:
    """Write a day for a table."""
    return "never" if at is None else f"{at:%Y-%m-%d}"


def written(at: datetime | None) -> str:
    """Write a minute for people."""
    return "never" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


def show_text(text: str) -> None:
    """Show a new key plain and alone, so that a double click, a pipe or a narrow terminal gives the whole of it."""
    typer.echo(text)
    typer.echo("\nShown once: copy it now. Only a hash of it is kept.")

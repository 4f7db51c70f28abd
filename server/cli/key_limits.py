"""The limits that hold for a key, its own or its tier's, as the command line shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from engine.config import load_config
from engine.errors import EngineError
from server.cli.key_fields import described
from server.limits import limits_of
from server.store.api_key import LIMITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine import TierSpec
    from server.settings import Settings
    from server.store import ApiKey

    Tiers = Mapping[str, TierSpec]

_SHORT = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "parallel_requests": "parallel",
    "batch_items": "batch items",
    "images_per_day": "images/day",
}
OWN = "*"


def tiers_of(settings: Settings) -> Tiers | None:
    """Read the tiers; None, with a word on stderr, where models.yaml cannot be read: keys are shown all the same."""
    try:
        return load_config(settings.models).tiers
    except EngineError as error:
        typer.echo(f"Limits of tiers are not shown: {error.message}", err=True)
        return None


def effective(key: ApiKey, tiers: Tiers | None) -> dict[str, int | None] | None:
    """Return the limits that hold, by name; null is no limit. None where the tiers are not known."""
    if tiers is None:
        return None
    limits = limits_of(key, tiers.get(key.tier))
    return {name: getattr(limits, name) for name in LIMITS}


def with_limits(key: ApiKey, tiers: Tiers | None) -> dict[str, Any]:
    """Return the key for JSON: `limits` are its own, `effective_limits` the ones that hold."""
    return described(key) | {"effective_limits": effective(key, tiers)}


def limit_rows(key: ApiKey, tiers: Tiers | None) -> dict[str, str]:
    """Return every limit and whose it is."""
    limits, shown = effective(key, tiers), {}
    for name in LIMITS:
        own = getattr(key.limits, name)
        limit = own if limits is None else limits[name]
        whose = "its tier's" if own is None else "its own"
        unknown = limits is None and own is None
        number = "unknown" if unknown else "no limit" if limit is None else str(limit)
        shown[name.replace("_", " ")] = f"{number} ({whose})"
    return shown


def short(key: ApiKey, tiers: Tiers | None) -> str:
    """Return the limits in a few words, like `30 requests/min*, 5 parallel`; the key's own have a star."""
    limits = effective(key, tiers) or {name: getattr(key.limits, name) for name in LIMITS}
    told = [
        f"{limits[name]} {words}{'' if getattr(key.limits, name) is None else OWN}"
        for name, words in _SHORT.items()
        if limits[name] is not None
    ]
    return ", ".join(told) or ("none" if tiers is not None else "its tier's")


def sentence(key: ApiKey, tiers: Tiers | None) -> str:
    """Return the limits as a line of their own, below what was done to the key."""
    told = short(key, tiers)
    note = f" ({OWN} its own; the others are its tier's)" if OWN in told else ""
    return f"Limits: {told}.{note}"

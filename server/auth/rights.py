"""The rights that a key may be given: whether its scopes, its tier and its models exist.

What a key's fields may hold in themselves is the store's to check.
"""

from collections.abc import Collection, Iterable
from datetime import datetime

from engine.config import Config
from engine.config.messages import near_miss
from server.store import KeyFieldError
from server.store.keys import SCOPES, ApiKey


def working_admins(keys: Iterable[ApiKey], now: datetime) -> list[str]:
    """Return the ids of the keys that work and have the scope `admin`."""
    return [key.public_id for key in keys if "admin" in key.scopes and key.usable_at(now)]


def check_scopes(scopes: Iterable[str]) -> None:
    """Raise `KeyFieldError` for a scope that there is not. For the command line and HTTP, like `check_rights`."""
    for scope in scopes:
        _check_known("scope", "scopes", scope, SCOPES)


def check_rights(config: Config, tier: str, models: Iterable[str], *, had: Collection[str] = ()) -> None:
    """Raise `KeyFieldError` unless the tier is configured and may use each of the models.

    A model that the key `had` may be gone from models.yaml.
    """
    _check_known("tier", "tier", tier, config.tiers)
    for model in models:
        entry = config.entry(model)
        if entry is None:
            _check_known("model", "models", model, {*config.entries, *had})
            continue
        needed = entry.tier
        if needed not in config.tiers[tier].models:
            message = f"Keys of tier {tier!r} may not use the model {model!r}: it is for tier {needed!r}."
            raise KeyFieldError("models", message)


def _check_known(kind: str, field: str, given: str, known: Iterable[str]) -> None:
    names = list(known)
    if given in names:
        return
    near = near_miss(given, names)
    meant = f" Did you mean {near!r}?" if near else ""
    shown = repr(given) if len(given) <= 64 and given.isprintable() else "of this name"
    raise KeyFieldError(field, f"There is no {kind} {shown}.{meant} Known: {', '.join(names)}.")

"""Whether what a key names is configured: tiers and models of models.yaml, and scopes. For the command line and HTTP.

What a key's fields may hold in themselves is the store's to check.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine import Config
from engine.config.messages import near_miss
from server.store import SCOPES, KeyFieldError


def check_scopes(scopes: Iterable[str]) -> None:
    """Raise `KeyFieldError` for a scope that there is not."""
    for scope in scopes:
        _check_known("scope", "scopes", scope, SCOPES)


def check_rights(config: Config, tier: str, models: Iterable[str]) -> None:
    """Raise `KeyFieldError` unless the tier is configured and may use each of the models."""
    _check_known("tier", "tier", tier, config.tiers)
    for model in models:
        _check_known("model", "models", model, config.models)
        needed = config.models[model].tier
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

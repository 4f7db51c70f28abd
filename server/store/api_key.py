"""What a key is: its fields, which values they may have, and how a row becomes one.

Reading and writing rows is `keys.py`'s; what a tier allows is decided by whoever asks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict

from server.store.errors import KeyFieldError
from server.store.schema import api_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Row

SCOPES = ("chat", "batch", "images", "audio", "models", "metrics", "admin")
OPERATOR_SCOPES = frozenset({"metrics", "admin"})  # they show or change what concerns everybody
DEFAULT_SCOPES = tuple(scope for scope in SCOPES if scope not in OPERATOR_SCOPES)
NAME_LENGTH = 64
NOTES_LENGTH = 1000
LARGEST_LIMIT = 2**31 - 1

COLUMNS = [column for column in api_key.c if column.name != "secret_sha256"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may use, where that is not what its tier says. None: as the tier; 0: nothing."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel_requests: int | None = None
    batch_items: int | None = None
    images_per_day: int | None = None


LIMITS = tuple(field.name for field in fields(KeyLimits))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key, without its secret. Datetimes are UTC; `models` None means all of its tier."""

    public_id: str
    name: str
    tier: str
    scopes: frozenset[str]
    models: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    notes: str = ""
    replaced_by: str | None = None
    limits: KeyLimits = KeyLimits()

    def usable_at(self, now: datetime) -> bool:
        """Whether the key is neither revoked nor, at `now`, expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyChanges(TypedDict, total=False):
    """What `KeyStore.update` changes; what is left out stays. A limit of None is the tier's again."""

    name: str
    tier: str
    scopes: Iterable[str]
    models: Iterable[str] | None
    notes: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel_requests: int | None
    batch_items: int | None
    images_per_day: int | None


def utc_now() -> datetime:
    return datetime.now(UTC)


def key_of(row: Row[*tuple[Any, ...]]) -> ApiKey:
    values = {column.name: getattr(row, column.name) for column in COLUMNS}
    limits = KeyLimits(**{name: values.pop(name) for name in LIMITS})
    values["scopes"] = frozenset(row.scopes)
    values["models"] = None if row.models is None else tuple(row.models)
    return ApiKey(**values, limits=limits)


def row_of(key: ApiKey) -> dict[str, Any]:
    values = {column.name: getattr(key, column.name) for column in COLUMNS if column.name not in LIMITS}
    values["scopes"] = sorted(key.scopes, key=SCOPES.index)
    return values | asdict(key.limits)


def check(key: ApiKey) -> None:
    """Raise KeyFieldError for a field that cannot be. Whether tier and models are configured is not known here."""
    if not (1 <= len(key.name) <= NAME_LENGTH and key.name.isprintable() and key.name.strip()):
        raise KeyFieldError("name", f"A key's name is 1 to {NAME_LENGTH} printable characters, not all blank.")
    if not (1 <= len(key.tier) <= NAME_LENGTH and key.tier.isprintable()):
        raise KeyFieldError("tier", "A key needs a tier.")
    unknown = sorted(key.scopes.difference(SCOPES))
    if unknown or not key.scopes:
        named = f"Unknown scope {unknown[0]!r}." if unknown else "A key needs at least one scope."
        raise KeyFieldError("scopes", f"{named} Scopes are: {', '.join(SCOPES)}.")
    if key.models is not None and not all(model and model.isprintable() for model in key.models):
        raise KeyFieldError("models", "A model's name is empty or has unprintable characters.")
    if key.models == ():
        raise KeyFieldError("models", "An empty list of models would make a key for nothing; leave it out for all.")
    if len(key.notes) > NOTES_LENGTH or not all(letter.isprintable() or letter in "\n\t" for letter in key.notes):
        raise KeyFieldError("notes", f"Notes are at most {NOTES_LENGTH} printable characters, tabs and line ends.")
    for name in LIMITS:
        limit = getattr(key.limits, name)
        if limit is not None and (isinstance(limit, bool) or not 0 <= limit <= LARGEST_LIMIT):
            raise KeyFieldError(name, f"{name} is a number from 0 to {LARGEST_LIMIT}, or null for the tier's.")


def check_end(expires_at: datetime | None, now: datetime) -> None:
    """Raise KeyFieldError for an end that has no time zone or has passed."""
    if expires_at is not None and expires_at.tzinfo is None:
        raise KeyFieldError("expires_at", "An expiry date must carry its time zone.")
    if expires_at is not None and expires_at <= now:
        raise KeyFieldError("expires_at", "The expiry date has passed already.")

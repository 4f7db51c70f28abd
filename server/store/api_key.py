"""What an API key is: its text, `hk_<12 public id>_<43 secret><6 checksum>` in base62, and its fields.

Owns which values the fields may have, and how a row becomes a key. Reading and writing rows is `keys.py`'s; what a tier
allows is decided by whoever asks.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypedDict

from sqlalchemy import Row

from server.store.errors import KeyFieldError
from server.store.schema import api_key

SCOPES = ("chat", "batch", "images", "audio", "models", "metrics", "admin")
OPERATOR_SCOPES = frozenset({"metrics", "admin"})  # they show or change what concerns everybody
DEFAULT_SCOPES = tuple(scope for scope in SCOPES if scope not in OPERATOR_SCOPES)
NAME_LENGTH = 64
NOTES_LENGTH = 1000
LARGEST_LIMIT = 2**31 - 1

COLUMNS = [column for column in api_key.c if column.name != "secret_sha256"]

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
PUBLIC_ID_LENGTH = 12
SECRET_LENGTH = 43  # 62**43 > 2**256

_PAIRS = tuple(first + second for first in ALPHABET for second in ALPHABET)
_KEY = re.compile(r"(hk_([0-9A-Za-z]{12})_[0-9A-Za-z]{43})([0-9A-Za-z]{6})")
_PUBLIC_ID = re.compile(r"[0-9A-Za-z]{12}")
_NAMED = re.compile(r"(?:hk_)?([0-9A-Za-z]{12})(?:_.*)?", re.DOTALL)


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


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made. `text` is shown to its owner once; only `sha256` (32 bytes) is kept."""

    public_id: str
    text: str = field(repr=False)
    sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key as presented, without its secret. `sha256` is of the whole text, 32 bytes."""

    public_id: str
    sha256: bytes = field(repr=False)


def new_key() -> NewKey:
    """Make a key with a 256 bit secret from the system's random source."""
    public_id = "".join(secrets.choice(ALPHABET) for _ in range(PUBLIC_ID_LENGTH))
    body = f"hk_{public_id}_{_base62(secrets.randbits(256), SECRET_LENGTH)}"
    text = body + _checksum(body)
    return NewKey(public_id, text, _sha256(text))


def parse(text: str) -> ParsedKey | None:
    """Take a presented key apart; None for any text that is not a key or was mistyped. Never raises.

    The checksum spares the database from garbage. It is no security: anyone can compute it.
    """
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    body, public_id, checksum = match.groups()
    if checksum != _checksum(body):
        return None
    return ParsedKey(public_id, _sha256(text))


def public_id_in(text: str) -> str | None:
    """The public id in what a person typed: the id, `hk_<id>`, or a whole key, mistyped or not."""
    match = _NAMED.fullmatch(text.strip())
    return match.group(1) if match else None


def is_public_id(text: str) -> bool:
    """Whether the text can be a public id at all."""
    return _PUBLIC_ID.fullmatch(text) is not None


def _base62(number: int, length: int) -> str:
    digits: list[str] = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    """Like `_base62` of six digits, but two at a time: it is made for the key of every request."""
    left, last = divmod(zlib.crc32(body.encode("ascii")), len(_PAIRS))
    first, middle = divmod(left, len(_PAIRS))
    return _PAIRS[first] + _PAIRS[middle] + _PAIRS[last]


def _sha256(text: str) -> bytes:
    # A slow hash would add nothing to 256 random bits, and would let strangers burn our CPU
    return hashlib.sha256(text.encode("ascii")).digest()

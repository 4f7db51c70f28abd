"""API keys: made, listed, revoked and recognised. Owns the rows; `key_format.py` owns their text.

What a key's tier allows is decided by whoever asks. Requests go through `key_cache.py`.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, insert, or_, select, update

from server.store.errors import KeyFieldError, KeyNotFoundError
from server.store.key_format import ParsedKey, new_key, parse
from server.store.schema import api_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sqlalchemy import Row

    from server.store.database import Database

SCOPES = ("chat", "batch", "images", "audio", "models", "metrics", "admin")
DEFAULT_SCOPES = tuple(scope for scope in SCOPES if scope != "admin")
NAME_LENGTH = 64

_NOBODY_SHA256 = secrets.token_bytes(32)
_COLUMNS = [column for column in api_key.c if column.name != "secret_sha256"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key, without its secret. Datetimes are UTC; `models` None means all of its tier."""

    public_id: str
    name: str
    tier: str
    scopes: frozenset[str]
    models: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    def usable_at(self, now: datetime) -> bool:
        """Whether the key is neither revoked nor, at `now`, expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


def utc_now() -> datetime:
    return datetime.now(UTC)


class KeyStore:
    """The keys in a database. `clock` gives aware datetimes. Any method may raise StoreUnavailableError."""

    def __init__(self, database: Database, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self.clock = clock

    async def create(
        self,
        name: str,
        tier: str,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        models: Iterable[str] | None = None,
        expires_at: datetime | None = None,
    ) -> tuple[str, ApiKey]:
        """Make a key. The text exists only in what this returns; it is on disk, as a hash, by then.

        Whether tier and models are configured is the caller's to check. Raises KeyFieldError.
        """
        now = self.clock()
        made = new_key()
        allowed = None if models is None else tuple(dict.fromkeys(models))
        key = ApiKey(
            public_id=made.public_id,
            name=name,
            tier=tier,
            scopes=frozenset(scopes),
            models=allowed,
            created_at=now,
            expires_at=expires_at,
            revoked_at=None,
            last_used_at=None,
        )
        _check(key, now)
        values = {column.name: getattr(key, column.name) for column in _COLUMNS}
        values["scopes"] = sorted(key.scopes, key=SCOPES.index)
        async with self._database.writing() as connection:
            await connection.execute(insert(api_key).values(**values, secret_sha256=made.sha256))
        return made.text, key

    async def list(self, include_revoked: bool = True) -> list[ApiKey]:  # noqa: FBT001, FBT002 - reads well by name
        """All keys, oldest first."""
        query = select(*_COLUMNS).order_by(api_key.c.created_at, api_key.c.public_id)
        if not include_revoked:
            query = query.where(api_key.c.revoked_at.is_(None))
        async with self._database.reading() as connection:
            return [_key(row) for row in await connection.execute(query)]

    async def revoke(self, public_id: str) -> ApiKey:
        """End a key for good; a key revoked before keeps its date. Raises KeyNotFoundError."""
        is_it = api_key.c.public_id == public_id
        async with self._database.writing() as connection:
            await connection.execute(
                update(api_key).where(is_it, api_key.c.revoked_at.is_(None)).values(revoked_at=self.clock())
            )
            row = (await connection.execute(select(*_COLUMNS).where(is_it))).one_or_none()
        if row is None:
            raise KeyNotFoundError(public_id)
        return _key(row)

    async def count_active(self) -> int:
        """How many keys work right now."""
        alive = or_(api_key.c.expires_at.is_(None), api_key.c.expires_at > self.clock())
        query = select(func.count()).select_from(api_key).where(api_key.c.revoked_at.is_(None), alive)
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def authenticate(self, text: str) -> ApiKey | None:
        """The usable key with this text, or None. Any text may be given."""
        parsed = parse(text)
        return None if parsed is None else await self.check(parsed)

    async def check(self, presented: ParsedKey) -> ApiKey | None:
        """The usable key presented, or None; the same work whether its public id is known or not."""
        is_it = api_key.c.public_id == presented.public_id
        # Exactly one row comes back either way, so that not even decoding it tells whether the id is known
        hash_only = select(select(api_key.c.secret_sha256).where(is_it).scalar_subquery())
        async with self._database.reading() as connection:
            stored = (await connection.execute(hash_only)).scalar_one() or _NOBODY_SHA256
            if not hmac.compare_digest(presented.sha256, stored):
                return None
            row = (await connection.execute(select(*_COLUMNS).where(is_it))).one_or_none()
        if row is None:
            return None
        key = _key(row)
        return key if key.usable_at(self.clock()) else None

    async def record_use(self, last_used_at: Mapping[str, datetime]) -> None:
        """Write when keys (by public id) were last used, in one transaction; a later date on disk stays."""
        if not last_used_at:
            return
        older = or_(api_key.c.last_used_at.is_(None), api_key.c.last_used_at < bindparam("used_at"))
        statement = (
            update(api_key)
            .where(api_key.c.public_id == bindparam("used_id"), older)
            .values(last_used_at=bindparam("used_at"))
        )
        rows: list[dict[str, Any]] = [{"used_id": name, "used_at": at} for name, at in last_used_at.items()]
        async with self._database.writing() as connection:
            await connection.execute(statement, rows)


def _check(key: ApiKey, now: datetime) -> None:
    if not (1 <= len(key.name) <= NAME_LENGTH and key.name.isprintable() and key.name.strip()):
        raise KeyFieldError("name", f"A key's name is 1 to {NAME_LENGTH} printable characters, not all blank.")
    if not key.tier:
        raise KeyFieldError("tier", "A key needs a tier.")
    unknown = sorted(key.scopes.difference(SCOPES))
    if unknown or not key.scopes:
        named = f"Unknown scope {unknown[0]!r}." if unknown else "A key needs at least one scope."
        raise KeyFieldError("scopes", f"{named} Scopes are: {', '.join(SCOPES)}.")
    if key.models is not None and not all(key.models):
        raise KeyFieldError("models", "A model's name is empty.")
    if key.models == ():
        raise KeyFieldError("models", "An empty list of models would make a key for nothing; leave it out for all.")
    if key.expires_at is not None and key.expires_at.tzinfo is None:
        raise KeyFieldError("expires_at", "An expiry date must carry its time zone.")
    if key.expires_at is not None and key.expires_at <= now:
        raise KeyFieldError("expires_at", "The expiry date has passed already.")


def _key(row: Row[*tuple[Any, ...]]) -> ApiKey:
    values = {column.name: getattr(row, column.name) for column in _COLUMNS}
    values["scopes"] = frozenset(row.scopes)
    values["models"] = None if row.models is None else tuple(row.models)
    return ApiKey(**values)

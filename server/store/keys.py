"""API keys in the database: made, listed, recognised, changed, rotated and ended, each change with its audit entry.

`api_key.py` owns the fields and the text. Requests go through `key_cache.py`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack

from sqlalchemy import bindparam, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.store.api_key import (
    COLUMNS,
    DEFAULT_SCOPES,
    LIMITS,
    ApiKey,
    KeyChanges,
    KeyLimits,
    NewKey,
    ParsedKey,
    check,
    check_end,
    is_public_id,
    key_of,
    new_key,
    parse,
    row_of,
    utc_now,
)
from server.store.audit import Actor, write_entry
from server.store.database import Database
from server.store.errors import KeyFieldError, KeyNotFoundError
from server.store.schema import api_key

LONGEST_OVERLAP = timedelta(days=366)
_UNKNOWN_SHA256 = secrets.token_bytes(32)


class KeyStore:
    """The keys in a database. `clock` gives aware datetimes. Any method may raise StoreUnavailableError.

    Each change writes an audit entry in its own transaction; `by` None means the local user.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self.clock = clock

    async def create(  # noqa: PLR0913 - the fields of a key
        self,
        name: str,
        tier: str,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        models: Iterable[str] | None = None,
        expires_at: datetime | None = None,
        *,
        notes: str = "",
        limits: KeyLimits = KeyLimits(),  # noqa: B008 - frozen
        by: Actor | None = None,
    ) -> tuple[str, ApiKey]:
        """Make a key. The text exists only in what this returns; it is on disk, as a hash, by then.

        Whether tier and models are configured is the caller's to check. Raises KeyFieldError.
        """
        now = self.clock()
        made = new_key()
        key = ApiKey(
            public_id=made.public_id,
            name=name,
            tier=tier,
            scopes=frozenset(scopes),
            models=_unique(models),
            created_at=now,
            expires_at=expires_at,
            notes=notes,
            limits=limits,
        )
        check(key)
        check_end(expires_at, now)
        async with self._database.writing() as connection:
            await _insert_key(connection, made, key)
            await write_entry(connection, now, by, "key.create", key.public_id, _audited(key))
        return made.text, key

    async def rotate(
        self,
        public_id: str,
        overlap: timedelta,
        *,
        expires_at: datetime | None = None,
        by: Actor | None = None,
    ) -> tuple[str, ApiKey]:
        """Make a successor with the same rights; the old key works for `overlap` more, never longer than it had.

        Without `expires_at` the successor lives as long as the old key was made for. Raises KeyNotFoundError,
        and KeyFieldError when the key is revoked, expired or was replaced before.
        """
        if not timedelta() <= overlap <= LONGEST_OVERLAP:
            raise KeyFieldError("overlap", f"The overlap is between 0 and {LONGEST_OVERLAP.days} days.")
        now = self.clock()
        check_end(expires_at, now)
        made = new_key()
        async with self._database.writing() as connection:
            old = await _found(connection, public_id, lock=True)
            _check_rotatable(old, now)
            if expires_at is None and old.expires_at is not None:
                expires_at = now + (old.expires_at - old.created_at)
            key = replace(old, public_id=made.public_id, created_at=now, expires_at=expires_at, last_used_at=None)
            await _insert_key(connection, made, key)
            end = min(now + overlap, old.expires_at or datetime.max.replace(tzinfo=UTC))
            await _set_fields(connection, public_id, expires_at=end, replaced_by=key.public_id)
            detail = {"replaced_by": key.public_id, "expires_at": end.isoformat()}
            await write_entry(connection, now, by, "key.rotate", public_id, detail)
        return made.text, key

    async def expire(self, public_id: str, at: datetime | None, *, by: Actor | None = None) -> ApiKey:
        """Set when a key ends; None: never. An expired key works again with a later end.

        Raises KeyNotFoundError, and KeyFieldError for a date that has passed or a revoked key.
        """
        now = self.clock()
        check_end(at, now)
        async with self._database.writing() as connection:
            key = await _found(connection, public_id, lock=True)
            _check_not_revoked(key)
            await _set_fields(connection, public_id, expires_at=at)
            detail = {"expires_at": [_iso(key.expires_at), _iso(at)]}
            await write_entry(connection, now, by, "key.expire", public_id, detail)
        return replace(key, expires_at=None if at is None else at.astimezone(UTC))

    async def update(self, public_id: str, *, by: Actor | None = None, **changes: Unpack[KeyChanges]) -> ApiKey:
        """Change some fields. Raises KeyNotFoundError, and KeyFieldError for a value or a revoked key."""
        async with self._database.writing() as connection:
            old = await _found(connection, public_id, lock=True)
            _check_not_revoked(old)
            new = _changed(old, changes)
            check(new)
            before, after = row_of(old), row_of(new)
            different = {name: value for name, value in after.items() if before[name] != value}
            if different:
                await _set_fields(connection, public_id, **different)
                # Notes are for the administrators and may be personal: that they changed is enough
                detail = {name: [before[name], after[name]] for name in different if name != "notes"}
                detail |= {"notes": ["changed"]} if "notes" in different else {}
                await write_entry(connection, self.clock(), by, "key.update", public_id, detail)
        return new

    async def revoke(self, public_id: str, *, by: Actor | None = None) -> ApiKey:
        """End a key for good; a key revoked before keeps its date. Raises KeyNotFoundError."""
        now = self.clock()
        async with self._database.writing() as connection:
            key = await _found(connection, public_id, lock=True)
            if key.revoked_at is not None:
                return key
            await _set_fields(connection, public_id, revoked_at=now)
            await write_entry(connection, now, by, "key.revoke", public_id, {"name": key.name})
        return replace(key, revoked_at=now)

    async def delete(self, public_id: str, *, by: Actor | None = None) -> None:
        """End a key and forget its row: for one that a program made for itself. Raises KeyNotFoundError.

        What people were given is revoked instead and stays in the list. The audit entries stay, and what it has used.
        """
        now = self.clock()
        async with self._database.writing() as connection:
            key = await _found(connection, public_id, lock=True)
            await connection.execute(delete(api_key).where(api_key.c.public_id == public_id))
            await write_entry(connection, now, by, "key.delete", public_id, {"name": key.name})

    async def list(self, include_revoked: bool = True) -> list[ApiKey]:  # noqa: FBT001, FBT002 - reads well by name
        """All keys, oldest first."""
        query = select(*COLUMNS).order_by(api_key.c.created_at, api_key.c.public_id)
        if not include_revoked:
            query = query.where(api_key.c.revoked_at.is_(None))
        async with self._database.reading() as connection:
            return [key_of(row) for row in await connection.execute(query)]

    async def find(self, public_id: str) -> ApiKey:
        """The key with this public id, usable or not. Raises KeyNotFoundError."""
        async with self._database.reading() as connection:
            return await _found(connection, public_id)

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
        # The id itself or the next one there is: a row is read either way, which costs what would tell them apart.
        # Beyond the last id there is none, which says nothing of any other.
        nearest = (
            select(api_key.c.public_id, api_key.c.secret_sha256)
            .where(api_key.c.public_id >= presented.public_id)
            .order_by(api_key.c.public_id)
            .limit(1)
        )
        async with self._database.reading() as connection:
            found_id, sha256 = (await connection.execute(nearest)).one_or_none() or ("", _UNKNOWN_SHA256)
            right = hmac.compare_digest(presented.sha256, sha256)
            if not (right and found_id == presented.public_id):
                return None
            is_it = api_key.c.public_id == presented.public_id
            row = (await connection.execute(select(*COLUMNS).where(is_it))).one_or_none()
        if row is None:
            return None
        key = key_of(row)
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
        # In one order everywhere: on PostgreSQL two processes would else wait for each other's rows
        rows: list[dict[str, Any]] = [{"used_id": name, "used_at": at} for name, at in sorted(last_used_at.items())]
        async with self._database.writing(durable=False) as connection:
            await connection.execute(statement, rows)


async def _insert_key(connection: AsyncConnection, made: NewKey, key: ApiKey) -> None:
    await connection.execute(insert(api_key).values(**row_of(key), secret_sha256=made.sha256))


async def _set_fields(connection: AsyncConnection, public_id: str, **values: Any) -> None:
    await connection.execute(update(api_key).where(api_key.c.public_id == public_id).values(**values))


async def _found(connection: AsyncConnection, public_id: str, *, lock: bool = False) -> ApiKey:
    if not is_public_id(public_id):
        raise KeyNotFoundError(public_id)
    query = select(*COLUMNS).where(api_key.c.public_id == public_id)
    # SQLite has no row locks and needs none: its write transaction is the only one
    row = (await connection.execute(query.with_for_update() if lock else query)).one_or_none()
    if row is None:
        raise KeyNotFoundError(public_id)
    return key_of(row)


def _changed(key: ApiKey, changes: KeyChanges) -> ApiKey:
    values: dict[str, Any] = dict(changes)
    limits = {name: values.pop(name) for name in LIMITS if name in values}
    if "scopes" in values:
        values["scopes"] = frozenset(values["scopes"])
    if "models" in values:
        values["models"] = _unique(values["models"])
    return replace(key, **values, limits=replace(key.limits, **limits))


def _unique(models: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if models is None else tuple(dict.fromkeys(models))


def _check_not_revoked(key: ApiKey) -> None:
    if key.revoked_at is not None:
        raise KeyFieldError("public_id", f"The key {key.public_id} is revoked, which is for good. Create a new one.")


def _check_rotatable(key: ApiKey, now: datetime) -> None:
    _check_not_revoked(key)
    if key.replaced_by is not None:
        raise KeyFieldError("public_id", f"The key {key.public_id} was replaced by {key.replaced_by}. Rotate that one.")
    if not key.usable_at(now):
        raise KeyFieldError("public_id", f"The key {key.public_id} has expired. Create a new one, or move its end.")


def _audited(key: ApiKey) -> dict[str, Any]:
    entry = {"name": key.name, "tier": key.tier, "scopes": sorted(key.scopes), "expires_at": _iso(key.expires_at)}
    entry |= {"models": None if key.models is None else list(key.models)}
    return entry | {name: limit for name, limit in asdict(key.limits).items() if limit is not None}


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat()

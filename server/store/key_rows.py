"""Reading and writing rows of keys inside a transaction, and the rules that look at the row as it is.

The fields' own rules are `api_key.py`'s; when a transaction begins and ends is `keys.py`'s.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update

from server.store.api_key import COLUMNS, LIMITS, ApiKey, KeyChanges, key_of, row_of
from server.store.errors import KeyFieldError, KeyNotFoundError
from server.store.key_format import NewKey, is_public_id
from server.store.schema import api_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.ext.asyncio import AsyncConnection


async def insert_key(connection: AsyncConnection, made: NewKey, key: ApiKey) -> None:
    await connection.execute(insert(api_key).values(**row_of(key), secret_sha256=made.sha256))


async def set_fields(connection: AsyncConnection, public_id: str, **values: Any) -> None:
    await connection.execute(update(api_key).where(api_key.c.public_id == public_id).values(**values))


async def found(connection: AsyncConnection, public_id: str, *, lock: bool = False) -> ApiKey:
    if not is_public_id(public_id):
        raise KeyNotFoundError(public_id)
    query = select(*COLUMNS).where(api_key.c.public_id == public_id)
    # SQLite has no row locks and needs none: its write transaction is the only one
    row = (await connection.execute(query.with_for_update() if lock else query)).one_or_none()
    if row is None:
        raise KeyNotFoundError(public_id)
    return key_of(row)


def changed(key: ApiKey, changes: KeyChanges) -> ApiKey:
    values: dict[str, Any] = dict(changes)
    limits = {name: values.pop(name) for name in LIMITS if name in values}
    if "scopes" in values:
        values["scopes"] = frozenset(values["scopes"])
    if "models" in values:
        values["models"] = unique(values["models"])
    return replace(key, **values, limits=replace(key.limits, **limits))


def unique(models: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if models is None else tuple(dict.fromkeys(models))


def check_not_revoked(key: ApiKey) -> None:
    if key.revoked_at is not None:
        raise KeyFieldError("public_id", f"The key {key.public_id} is revoked, which is for good. Create a new one.")


def check_rotatable(key: ApiKey, now: datetime) -> None:
    check_not_revoked(key)
    if key.replaced_by is not None:
        raise KeyFieldError("public_id", f"The key {key.public_id} was replaced by {key.replaced_by}. Rotate that one.")
    if not key.usable_at(now):
        raise KeyFieldError("public_id", f"The key {key.public_id} has expired. Create a new one, or move its end.")


def told_of(key: ApiKey) -> dict[str, Any]:
    told = {"name": key.name, "tier": key.tier, "scopes": sorted(key.scopes), "expires_at": iso(key.expires_at)}
    told |= {"models": None if key.models is None else list(key.models)}
    return told | {name: limit for name, limit in asdict(key.limits).items() if limit is not None}


def iso(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat()

"""`/v1/admin/keys`: what `hearth keys` does, for keys with the scope `admin`; and `/v1/usage`: what keys have used.

Nobody can lock themselves out over HTTP. The command line uses the store directly: the owner of the machine can
always make a new admin key. Each key may read its own usage, and with the scope `admin` all.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from engine import Engine
from server.api.admin.schema import (
    ChangesBody,
    ExpireBody,
    Key,
    NewKey,
    NewKeyBody,
    RotateBody,
    UsageQuery,
    UsageSum,
    check_rights,
    groups,
    working_admins,
)
from server.api.caller import TheActor, of_app
from server.api.schema import Listed
from server.auth.access import KeyWith
from server.errors import ApiError
from server.http.bodies import StrictRoute
from server.store import StoreUnavailableError
from server.store.key_cache import KeyCache
from server.store.keys import ApiKey, KeyLimits
from server.store.usage import UsageBook


@dataclass(slots=True)
class KeyAdmin:
    """One per process: its cached keys, which have to follow each change in the store."""

    cache: KeyCache
    engine: Engine
    # Two admins that revoke each other's keys at the same moment would both find that one is left.
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def changed(self, key: ApiKey) -> Key:
        """Have this process know of a change in the store at once; others do within seconds."""
        self.cache.ask_again(key.public_id)
        return Key.model_validate(key)

    @asynccontextmanager
    async def without_lockout(self, public_id: str, param: str) -> AsyncIterator[None]:
        """Refuse to take the last key that works and has the scope `admin`. Exact within this process."""
        async with self._one_at_a_time:
            store = self.cache.store
            if working_admins(await store.list(), store.clock()) == [public_id]:
                sentence = (
                    "This is the last key with the scope `admin` that works, and without one the server "
                    "could not be administered over HTTP. Create another first, or use `hearth keys` on the machine."
                )
                raise ApiError(400, "invalid_value", sentence, param=param)
            yield


TheKeyAdmin = Annotated[KeyAdmin, Depends(of_app("key_admin"))]
router = APIRouter(
    prefix="/v1/admin/keys", tags=["admin"], route_class=StrictRoute, dependencies=[Depends(KeyWith("admin"))]
)


@router.post("")
async def create_key(body: NewKeyBody, keys: TheKeyAdmin, by: TheActor) -> NewKey:
    """Make a key. Its text is in this answer and never again."""
    check_rights(keys.engine.config, body.tier, body.models or ())
    fields = body.model_dump(exclude={"limits"})
    return NewKey.made(*await keys.cache.store.create(**fields, limits=KeyLimits(**dict(body.limits)), by=by))


@router.get("")
async def list_keys(keys: TheKeyAdmin) -> Listed[Key]:
    """List all keys, oldest first, also those that are revoked or expired."""
    return Listed(data=[Key.model_validate(key) for key in await keys.cache.store.list()])


@router.get("/{public_id}")
async def retrieve_key(public_id: str, keys: TheKeyAdmin) -> Key:
    """Show one key."""
    return Key.model_validate(await keys.cache.store.find(public_id))


@router.patch("/{public_id}")
async def update_key(public_id: str, body: ChangesBody, keys: TheKeyAdmin, by: TheActor) -> Key:
    """Change name, tier, scopes, models, notes or limits."""
    changes = body.model_dump(exclude_unset=True)
    changes |= changes.pop("limits", {})
    if "tier" in changes or "models" in changes:
        old = await keys.cache.store.find(public_id)
        models = changes.get("models", old.models) or ()
        check_rights(keys.engine.config, changes.get("tier", old.tier), models, had=old.models or ())
    stays_admin = "admin" in changes.get("scopes", ("admin",))
    async with nullcontext() if stays_admin else keys.without_lockout(public_id, "scopes"):
        return keys.changed(await keys.cache.store.update(public_id, by=by, **changes))


@router.post("/{public_id}/rotate")
async def rotate_key(public_id: str, body: RotateBody, keys: TheKeyAdmin, by: TheActor) -> NewKey:
    """Make a successor with the same rights; the old key works on for a while."""
    overlap = timedelta(seconds=body.overlap_seconds)
    made = await keys.cache.store.rotate(public_id, overlap, expires_at=body.expires_at, by=by)
    keys.cache.ask_again(public_id)
    return NewKey.made(*made)


@router.post("/{public_id}/expire")
async def expire_key(public_id: str, body: ExpireBody, keys: TheKeyAdmin, by: TheActor) -> Key:
    """Set when a key ends, or that it never does."""
    async with nullcontext() if body.expires_at is None else keys.without_lockout(public_id, "expires_at"):
        return keys.changed(await keys.cache.store.expire(public_id, body.expires_at, by=by))


@router.post("/{public_id}/revoke")
async def revoke_key(public_id: str, keys: TheKeyAdmin, by: TheActor) -> Key:
    """End a key for good."""
    async with keys.without_lockout(public_id, "public_id"):
        key = await keys.cache.store.revoke(public_id, by=by)
    keys.cache.revoked(key.public_id)
    return Key.model_validate(key)


usage = APIRouter(prefix="/v1", tags=["usage"])


@usage.get("/usage")
async def read_usage(query: Annotated[UsageQuery, Query()], request: Request) -> Listed[UsageSum]:
    """Sum up requests and tokens by hour, day, model, kind or key; in the order of time, key, model and kind."""
    key: ApiKey = request.state.key
    book: UsageBook = request.app.state.meter.book
    owner = query.key
    if "admin" not in key.scopes:
        if owner not in {None, key.public_id}:
            sentence = "Only keys with the scope `admin` may read the usage of others. Leave `key` out for your own."
            raise ApiError(403, "insufficient_permissions", sentence, param="key")
        owner = key.public_id
    with suppress(StoreUnavailableError):
        await book.flush()  # what was used a moment ago belongs to it
    rows = await book.read(query.since, query.until, key=owner, model=query.model, group_by=groups(query.by))
    return Listed(data=[UsageSum.of(row) for row in rows])

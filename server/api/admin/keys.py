"""`/v1/admin/keys`: what `hearth keys` does, for keys with the scope `admin`, and no way to lock oneself out.

The command line goes to the store itself: whoever has the machine can always make a new admin key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends

from engine import Config
from server.api.admin.schema import ChangesBody, ExpireBody, Key, KeyList, NewKey, NewKeyBody, RotateBody
from server.api.dependencies import TheActor, of_app
from server.auth.access import KeyWith, check_rights, check_scopes
from server.errors import ApiError
from server.http.routing import StrictRoute
from server.store import Actor, ApiKey, KeyCache, KeyLimits, KeyStore


class KeyAdmin:
    """One per process. All methods may raise `ApiError` and the store's errors."""

    def __init__(self, keys: KeyCache, config: Callable[[], Config]) -> None:
        self._keys = keys
        self._config = config
        # Two admins that revoke each other's keys at the same moment would both find that one is left.
        self._one_at_a_time = asyncio.Lock()

    @property
    def store(self) -> KeyStore:
        """The keys themselves, for reading."""
        return self._keys.store

    async def create(self, body: NewKeyBody, by: Actor) -> tuple[str, ApiKey]:
        """Make a key."""
        check_scopes(body.scopes)
        check_rights(self._config(), body.tier, body.models or ())
        return await self.store.create(
            body.name,
            body.tier,
            body.scopes,
            body.models,
            body.expires_at,
            notes=body.notes,
            limits=KeyLimits(**dict(body.limits)),
            by=by,
        )

    async def update(self, public_id: str, body: ChangesBody, by: Actor) -> ApiKey:
        """Change what the body names."""
        changes = body.changes()
        check_scopes(changes.get("scopes", ()))
        if "tier" in changes or "models" in changes:
            old = await self.store.find(public_id)
            check_rights(self._config(), changes.get("tier", old.tier), changes.get("models", old.models) or ())
        if "admin" in changes.get("scopes", ("admin",)):
            return await self._changed(self.store.update(public_id, by=by, **changes))
        async with self._without_lockout(public_id, "scopes"):
            return await self._changed(self.store.update(public_id, by=by, **changes))

    async def rotate(self, public_id: str, body: RotateBody, by: Actor) -> tuple[str, ApiKey]:
        """Make a successor."""
        overlap = timedelta(seconds=body.overlap_seconds)
        made = await self.store.rotate(public_id, overlap, expires_at=body.expires_at, by=by)
        self._keys.ask_again(public_id)
        return made

    async def expire(self, public_id: str, body: ExpireBody, by: Actor) -> ApiKey:
        """Set or take away the end of a key."""
        if body.expires_at is None:
            return await self._changed(self.store.expire(public_id, None, by=by))
        async with self._without_lockout(public_id, "expires_at"):
            return await self._changed(self.store.expire(public_id, body.expires_at, by=by))

    async def revoke(self, public_id: str, by: Actor) -> ApiKey:
        """End a key for good, in this process at once."""
        async with self._without_lockout(public_id, "public_id"):
            key = await self.store.revoke(public_id, by=by)
        self._keys.revoked(key.public_id)
        return key

    async def _changed(self, change: Awaitable[ApiKey]) -> ApiKey:
        """Have this process know of a change at once; others do within seconds."""
        key = await change
        self._keys.ask_again(key.public_id)
        return key

    @asynccontextmanager
    async def _without_lockout(self, public_id: str, param: str) -> AsyncIterator[None]:
        """Refuse to take the last key that works and has the scope `admin`. Exact within this process."""
        async with self._one_at_a_time:
            now = self.store.clock()
            admins = [key.public_id for key in await self.store.list() if "admin" in key.scopes and key.usable_at(now)]
            if admins == [public_id]:
                raise ApiError(
                    400,
                    "invalid_value",
                    "This is the last key with the scope `admin` that works, and without one nobody could administer "
                    "this server from afar. Create another first, or use `hearth keys` on the machine itself.",
                    param=param,
                )
            yield


TheKeyAdmin = Annotated[KeyAdmin, Depends(of_app("key_admin"))]
router = APIRouter(
    prefix="/v1/admin/keys", tags=["admin"], route_class=StrictRoute, dependencies=[Depends(KeyWith("admin"))]
)


@router.post("")
async def create_key(body: NewKeyBody, keys: TheKeyAdmin, by: TheActor) -> NewKey:
    """Make a key. Its text is in this answer and never again."""
    return NewKey.made(*await keys.create(body, by))


@router.get("")
async def list_keys(keys: TheKeyAdmin) -> KeyList:
    """List all keys, oldest first, also those that are revoked or expired."""
    return KeyList(data=[Key.of(key) for key in await keys.store.list()])


@router.get("/{public_id}")
async def retrieve_key(public_id: str, keys: TheKeyAdmin) -> Key:
    """Show one key."""
    return Key.of(await keys.store.find(public_id))


@router.patch("/{public_id}")
async def update_key(public_id: str, body: ChangesBody, keys: TheKeyAdmin, by: TheActor) -> Key:
    """Change name, tier, scopes, models, notes or limits."""
    return Key.of(await keys.update(public_id, body, by))


@router.post("/{public_id}/rotate")
async def rotate_key(public_id: str, body: RotateBody, keys: TheKeyAdmin, by: TheActor) -> NewKey:
    """Make a successor with the same rights; the old key works on for a while."""
    return NewKey.made(*await keys.rotate(public_id, body, by))


@router.post("/{public_id}/expire")
async def expire_key(public_id: str, body: ExpireBody, keys: TheKeyAdmin, by: TheActor) -> Key:
    """Set when a key ends, or that it never does."""
    return Key.of(await keys.expire(public_id, body, by))


@router.post("/{public_id}/revoke")
async def revoke_key(public_id: str, keys: TheKeyAdmin, by: TheActor) -> Key:
    """End a key for good."""
    return Key.of(await keys.revoke(public_id, by))

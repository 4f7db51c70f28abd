"""What an administrator may do to keys over HTTP: the store's verbs, the names checked, and no way to lock oneself out.

The command line goes to the store itself: whoever has the machine can always make a new admin key.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from server.errors import ApiError
from server.key_rules import check_rights, check_scopes
from server.store import KeyLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from engine import Config
    from server.schemas.admin import ChangesBody, ExpireBody, NewKeyBody, RotateBody
    from server.store import Actor, ApiKey, KeyCache, KeyStore


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
            admins = [
                key.public_id
                for key in await self.store.list(include_revoked=False)
                if "admin" in key.scopes and key.usable_at(now)
            ]
            if admins == [public_id]:
                raise ApiError(
                    400,
                    "invalid_value",
                    "This is the last key with the scope `admin` that works, and without one nobody could administer "
                    "this server from afar. Create another first, or use `hearth keys` on the machine itself.",
                    param=param,
                )
            yield

"""The keys as this process knows them: what was revoked here stops at once, not when the cache asks again."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.store import ApiKey, KeyCache


@dataclass(eq=False)
class LiveKeys(KeyCache):
    """A `KeyCache` that is told of revocations. They are for good, so what it was told never becomes wrong."""

    _revoked: set[str] = field(default_factory=set, init=False, repr=False)

    def revoked(self, public_id: str) -> None:
        """From now on nobody gets in with this key, also while the store fails."""
        self._revoked.add(public_id)

    async def authenticate(self, text: str) -> ApiKey | None:
        """Like `KeyCache.authenticate`."""
        key = await super().authenticate(text)
        return None if key is None or key.public_id in self._revoked else key

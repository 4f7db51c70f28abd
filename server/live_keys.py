"""The keys as this process knows them: what was revoked here stops at once, not when the cache asks again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from server.store import ApiKey, KeyCache


class Follower(Protocol):
    """Is told, too."""

    def __call__(self, public_id: str, *, revoked: bool) -> None:
        """Take note that a key was revoked, or changed."""
        ...


@dataclass(eq=False)
class LiveKeys(KeyCache):
    """A `KeyCache` that is told of revocations. They are for good, so what it was told never becomes wrong.

    `followers` are told of them, too, and of changes.
    """

    followers: list[Follower] = field(default_factory=list, init=False, repr=False)
    _revoked: set[str] = field(default_factory=set, init=False, repr=False)

    def revoked(self, public_id: str) -> None:
        """From now on nobody gets in with this key, also while the store fails."""
        self._revoked.add(public_id)
        for follow in self.followers:
            follow(public_id, revoked=True)

    def ask_again(self, public_id: str) -> None:
        """Like `KeyCache.ask_again`."""
        super().ask_again(public_id)
        for follow in self.followers:
            follow(public_id, revoked=False)

    async def authenticate(self, text: str) -> ApiKey | None:
        """Like `KeyCache.authenticate`."""
        key = await super().authenticate(text)
        return None if key is None or key.public_id in self._revoked else key

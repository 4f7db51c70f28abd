"""Keeps recently seen keys in memory, so that requests rarely need the database, and not while it fails.

Owns freshness, staleness and the batch of last-used dates; `keys.py` decides what a valid key is.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from server.store import StoreUnavailableError
from server.store.database import WrittenLater
from server.store.keys import ApiKey, KeyStore, parse


@dataclass(slots=True)
class _Known:
    key: ApiKey
    confirmed_at: float  # when the store was last asked and vouched for it
    ask_again_at: float


@dataclass(eq=False)
class KeyCache(WrittenLater):
    """Authenticates through a bounded cache of the store's answers. Use as `async with`; see also `flush`.

    A revoked key stops working `ttl_seconds` + one lookup after the revocation, in every process. While
    the store fails, keys seen before go on working until `stale_seconds` after it last vouched for them; all
    others raise StoreUnavailableError: it is unknown whether they are valid. `clock` is monotonic seconds.
    """

    store: KeyStore
    ttl_seconds: float = 4.0  # the page asks every 5 s, so it is signed out within 10
    unknown_ttl_seconds: float = 1.0
    max_entries: int = 4096
    clock: Callable[[], float] = time.monotonic
    stale_seconds: float = 300.0
    lookup_timeout_seconds: float = 3.0
    flush_every_seconds: float = 60.0
    # Both by SHA-256 of the presented text, least recently used first. Apart from each other, so that a
    # stranger's stream of invented keys cannot push out the real ones.
    _known: OrderedDict[bytes, _Known] = field(default_factory=OrderedDict, init=False, repr=False)
    _unknown: OrderedDict[bytes, float] = field(default_factory=OrderedDict, init=False, repr=False)
    _lookups: dict[bytes, asyncio.Task[ApiKey | None]] = field(default_factory=dict, init=False, repr=False)
    _used: dict[str, datetime] = field(default_factory=dict, init=False, repr=False)
    _revoked: set[str] = field(default_factory=set, init=False, repr=False)

    async def authenticate(self, text: str) -> ApiKey | None:
        """The usable key with this text, or None. Any text may be given. Raises StoreUnavailableError."""
        presented = parse(text)
        if presented is None:
            return None
        return await self.admit(presented.sha256, partial(self.store.check, presented))

    async def admit(self, sha256: bytes, ask: Callable[[], Awaitable[ApiKey | None]]) -> ApiKey | None:
        """The usable key of what has this hash, a key or a session; `ask` asks the store for it."""
        now = self.clock()
        known = self._known.get(sha256)
        if known is not None and now < known.ask_again_at:
            self._known.move_to_end(sha256)
            return self._admit(known.key)
        if now < self._unknown.get(sha256, now):
            return None
        try:
            return self._admit(await self._look_up(sha256, ask))
        except StoreUnavailableError:
            known, now = self._known.get(sha256), self.clock()
            if known is None or now - known.confirmed_at > self.stale_seconds:
                raise
            # One request per ttl waits for the failing store, not every one
            known.ask_again_at = now + self.ttl_seconds
            return self._admit(known.key)

    def revoked(self, public_id: str) -> None:
        """From now on this key is refused, also while the store fails: a revocation is for good."""
        self._revoked.add(public_id)

    def ask_again(self, public_id: str) -> None:
        """Ask the store about this key when it is next used: it was changed just now."""
        for known in self._known.values():
            if known.key.public_id == public_id:
                known.ask_again_at = self.clock()

    def forget(self, sha256: bytes) -> None:
        """Forget a session that has ended, by its hash."""
        self._known.pop(sha256, None)

    async def flush(self) -> None:
        """Write the collected last-used dates in one transaction. On StoreUnavailableError they are kept."""
        used, self._used = self._used, {}
        try:
            await self.store.record_use(used)
        except BaseException:
            self._used = used | self._used
            raise

    def _admit(self, key: ApiKey | None) -> ApiKey | None:
        if key is None:
            return None
        now = self.store.clock()
        if key.public_id in self._revoked or not key.usable_at(now):
            return None
        self._used[key.public_id] = now
        return key

    async def _look_up(self, sha256: bytes, ask: Callable[[], Awaitable[ApiKey | None]]) -> ApiKey | None:
        lookup = self._lookups.get(sha256)
        if lookup is None:
            # A task of its own: callers that leave must not take the answer away from the others
            lookup = self.tasks.start(self._ask(sha256, ask))
            self._lookups[sha256] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(sha256))
        await asyncio.wait({lookup}, timeout=self.lookup_timeout_seconds)
        if not lookup.done() or lookup.cancelled():
            raise StoreUnavailableError("The key database does not answer. Try again in a few seconds.")
        return lookup.result()

    async def _ask(self, sha256: bytes, ask: Callable[[], Awaitable[ApiKey | None]]) -> ApiKey | None:
        asked_at = self.clock()
        key = await ask()
        # Known is recorded here rather than by the caller, so that an answer after the timeout counts too
        if key is None:
            self._known.pop(sha256, None)
            self._unknown[sha256] = self.clock() + self.unknown_ttl_seconds
            self._unknown.move_to_end(sha256)
        else:
            self._unknown.pop(sha256, None)
            self._known[sha256] = _Known(key, asked_at, asked_at + self.ttl_seconds)
            self._known.move_to_end(sha256)
        for entries in (self._known, self._unknown):
            while len(entries) > self.max_entries:
                entries.popitem(last=False)
        return key

    def unwritten(self) -> str:
        return f"last-used dates of {len(self._used)} keys are"

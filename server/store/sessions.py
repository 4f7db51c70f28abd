"""Sessions of the page: two random halves each, of which only the SHA-256 is on disk, and the key that signed in.

A session is as good as its key, for as long as both live. What a browser is given of it is decided above.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, or_, select, update

from server.store.audit import Actor, write_entry
from server.store.database import Database
from server.store.keys import ApiKey, KeyStore
from server.store.schema import console_session, utc_now

IDLE = timedelta(hours=12)
LONGEST = timedelta(days=7)
SESSIONS_PER_KEY = 20
_SEEN_EVERY = timedelta(minutes=1)


class SessionStore:
    """The sessions in a database. `clock` gives aware datetimes. Any method may raise StoreUnavailableError."""

    def __init__(self, database: Database, keys: KeyStore, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock

    async def create(self, key: ApiKey, origin: str) -> tuple[str, str]:
        """Begin a session of a usable key, and return its halves. The key's oldest ones past 20 end, and stale ones."""
        now, table = self._clock(), console_session.c
        halves = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        newest = select(table.id_sha256).where(table.key_id == key.public_id).order_by(table.last_seen.desc())
        kept = newest.limit(SESSIONS_PER_KEY - 1).subquery()
        mine_and_old = (table.key_id == key.public_id) & table.id_sha256.not_in(select(kept.c.id_sha256))
        stale = or_(table.expires_at <= now, table.last_seen <= now - IDLE)
        async with self._database.writing() as connection:
            await connection.execute(delete(console_session).where(or_(stale, mine_and_old)))
            await connection.execute(
                insert(console_session).values(
                    id_sha256=digest(halves[0]),
                    token_sha256=digest(halves[1]),
                    key_id=key.public_id,
                    created_at=now,
                    last_seen=now,
                    expires_at=now + LONGEST,
                )
            )
            await write_entry(connection, now, Actor(key.public_id, origin), "console.login", key.public_id)
        return halves

    async def check(self, half: str, token: str) -> ApiKey | None:
        """Return the usable key of a session that goes on, None for halves that are not of one."""
        now, ours = self._clock(), console_session.c.id_sha256 == digest(half)
        row = await self._database.first(select(console_session).where(ours))
        if row is None or not hmac.compare_digest(digest(token), row["token_sha256"]):
            return None
        if now >= min(row["expires_at"], row["last_seen"] + IDLE):
            return None
        if now - row["last_seen"] >= _SEEN_EVERY:
            await self._database.change(update(console_session).where(ours).values(last_seen=now), durable=False)
        key = await self._keys.find(row["key_id"])
        return key if key.usable_at(now) else None

    async def end(self, half: str) -> None:
        await self._database.change(delete(console_session).where(console_session.c.id_sha256 == digest(half)))


def digest(half: str) -> bytes:
    """Return what is kept of a half. A slow hash would add nothing to 256 random bits."""
    return hashlib.sha256(half.encode()).digest()

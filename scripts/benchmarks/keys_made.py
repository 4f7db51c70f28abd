"""Keys by the hundred for `bench keys`, made straight in the server's database, and keys that only look like these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from benchmarks.workplace import TIER
from server.store import Database, KeyLimits, KeyStore, sqlite_url
from server.store.api_key import PUBLIC_ID_LENGTH, _checksum, new_key
from server.store.sqlite import FILE_NAME

if TYPE_CHECKING:
    from benchmarks.workplace import Workplace

# Never reached: measured is what it costs to count, not to refuse.
AMPLE = KeyLimits(requests_per_minute=1_000_000, tokens_per_minute=1_000_000_000)
_ID = slice(3, 3 + PUBLIC_ID_LENGTH)
_CHECKSUM_LENGTH = 6


class MadeKeys(msgspec.Struct, frozen=True):
    """The texts of valid keys: those that are limited, and those that are not."""

    limited: list[str]
    unlimited: list[str]


async def make_keys(place: Workplace, count: int) -> MadeKeys:
    """Make `count` keys of each kind in the data directory of a server that need not run."""
    folder = place.folder / "data"
    folder.mkdir(mode=0o700, exist_ok=True)
    async with await Database.open(sqlite_url(folder / FILE_NAME)) as database:
        store = KeyStore(database)
        limited = [(await store.create(f"limited {number}", TIER, limits=AMPLE))[0] for number in range(count)]
        unlimited = [(await store.create(f"unlimited {number}", TIER))[0] for number in range(count)]
    return MadeKeys(limited, unlimited)


def unknown_key() -> str:
    """Return a well-formed key that nobody was given."""
    return new_key().text


def wrong_secret(known: str) -> str:
    """Return a well-formed key with the public id of a known one, and another secret."""
    made = new_key().text
    body = f"{made[: _ID.start]}{known[_ID]}{made[_ID.stop : -_CHECKSUM_LENGTH]}"
    return body + _checksum(body)

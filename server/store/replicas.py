"""What servers of one PostgreSQL know of each other: how many requests of each key run elsewhere, and keys they share.

Each server has a row, which it renews all the time. With SQLite there is one server, and nothing is written.
"""

import secrets
from collections import Counter
from contextlib import suppress
from typing import Self

from sqlalchemy import delete, func, select

from server.store.database import Database, WrittenLater
from server.store.errors import StoreUnavailableError
from server.store.schema import replica, secret

_GONE_SECONDS = 5.0
_FORGOTTEN_SECONDS = 3600.0


class Replicas(WrittenLater):
    """The row of this server, and what the rows of the others say. Use as `async with`.

    A key's requests elsewhere are known to within a second; those of a server that has died count for 5 s. `running`
    says how many requests of each key run here; it is written by what counts them.
    """

    flush_every_seconds = 0.4  # written that late and read that late: twice of it, and two queries, are within a second

    def __init__(self, database: Database, name: str | None = None) -> None:
        self._database = database
        self._shared = database.kind == "postgresql"
        self._name = f"{name or 'server'}-{secrets.token_hex(4)}"[-64:]
        self.running: dict[str, int] = {}
        self._elsewhere = Counter[str]()

    async def __aenter__(self) -> Self:
        return await super().__aenter__() if self._shared else self

    def elsewhere(self, key: str) -> int:
        return self._elsewhere[key]

    async def flush(self) -> None:
        """Renew the row, and read those of the others."""
        now = func.extract("epoch", func.clock_timestamp())  # the database's clock: theirs may differ
        row = {"renewed_at": now, "running": {key: number for key, number in self.running.items() if number}}
        mine = self._database.upsert(replica).values(id=self._name, **row)
        others = select(replica.c.running).where(replica.c.id != self._name, replica.c.renewed_at > now - _GONE_SECONDS)
        try:
            async with self._database.writing(durable=False) as connection:
                await connection.execute(mine.on_conflict_do_update(index_elements=["id"], set_=row))
                found = (await connection.execute(others)).scalars().all()
        except StoreUnavailableError:
            self._elsewhere.clear()  # better too many for a moment than requests of a server that is gone
            raise
        self._elsewhere = Counter()
        for running in found:
            self._elsewhere.update(running)

    async def close(self) -> None:
        """Take the row away, and what dead servers have left."""
        await self.tasks.cancel()
        if not self._shared:
            return
        now = func.extract("epoch", func.clock_timestamp())
        old = (replica.c.id == self._name) | (replica.c.renewed_at < now - _FORGOTTEN_SECONDS)
        with suppress(StoreUnavailableError):  # it is gone in 5 s anyhow
            await self._database.change(delete(replica).where(old), durable=False)


async def shared_key(database: Database, name: str, mine: bytes) -> bytes:
    """Return the key that all servers of this database have under this name: `mine`, for the first that asks."""
    async with database.writing() as connection:
        await connection.execute(database.upsert(secret).values(name=name, value=mine).on_conflict_do_nothing())
        return bytes((await connection.execute(select(secret.c.value).where(secret.c.name == name))).scalar_one())

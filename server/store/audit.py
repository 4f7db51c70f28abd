"""Who changed what and when: written in the transaction of the change, so that neither is there without the other.

Whoever makes a change decides whether it is worth an entry. No entry may have a secret.
"""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.store.database import Database
from server.store.schema import audit


@dataclass(frozen=True, slots=True)
class Actor:
    """Who: `cli:<unix user>` or a key's public id; and from where: an IP address or `local`."""

    name: str
    origin: str = "local"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change. `action` is like `key.revoke`, `object` what it was done to, `detail` JSON without secrets."""

    id: int
    at: datetime
    actor: str
    origin: str
    action: str
    object: str
    detail: dict[str, Any]


def local_actor() -> Actor:
    """The user that this process runs as, not one that its environment claims."""
    try:
        return Actor(f"cli:{pwd.getpwuid(os.getuid()).pw_name}")
    except KeyError:  # a container's user without an entry
        return Actor(f"cli:{os.getuid()}")


async def write_entry(  # noqa: PLR0913, PLR0917 - the columns of one row
    connection: AsyncConnection,
    at: datetime,
    by: Actor | None,
    action: str,
    object_: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Add an entry to the caller's transaction; without `by`, the local user did it."""
    actor = by or local_actor()
    await connection.execute(
        insert(audit).values(
            at=at, actor=actor.name, origin=actor.origin, action=action, object=object_, detail=dict(detail or {})
        )
    )


async def read_entries(database: Database, limit: int = 100, since: datetime | None = None) -> list[AuditEntry]:
    """The newest entries first, at most `limit` (1 to 10,000); with `since`, none from before it."""
    query = select(audit).order_by(audit.c.at.desc(), audit.c.id.desc()).limit(max(1, min(limit, 10_000)))
    if since is not None:
        query = query.where(audit.c.at >= since)
    return [AuditEntry(**row) for row in await database.rows(query)]

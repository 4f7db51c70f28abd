"""HTTP clients with keys of their own, for tests of what single keys may do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from serving import Key, Server


@asynccontextmanager
async def client_with(server: Server, key: str) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=240) as client:
        yield client


@asynccontextmanager
async def client_of(
    server: Server, admin: httpx2.AsyncClient, tier: str, **limits: int
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client with a new key of this tier and with limits of its own."""
    made = await admin.post("/v1/admin/keys", json={"name": tier, "tier": tier, "limits": limits})
    assert made.status_code == 200, made.text
    server.made_keys.append(Key(made.json()["key"]))
    async with client_with(server, made.json()["key"]) as client:
        yield client

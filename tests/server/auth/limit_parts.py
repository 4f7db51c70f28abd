"""What tests of limits ask for: a short answer, a long one that is left, and one that cannot be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from chat_parts import CHAT, HELLO, MODEL
from standstill import standstill, until_asked

if TYPE_CHECKING:
    import httpx2
    from serving import Server

SHORT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 1, "temperature": 0}
LONG = SHORT | {"max_tokens": 700, "ignore_eos": True}
TOO_LONG = SHORT | {"messages": [{"role": "user", "content": "many words " * 20000}]}


@asynccontextmanager
async def streaming(client: httpx2.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
    """A long answer that has begun; leaving the block leaves the server."""
    async with client.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        yield lines


@asynccontextmanager
async def running(server: Server, client: httpx2.AsyncClient, count: int = 1) -> AsyncIterator[AsyncExitStack]:
    """So many long answers that have begun; none goes on before the end of the block, where they are left."""
    still = standstill(server, MODEL)
    async with AsyncExitStack() as opened:
        for _ in range(count):
            await opened.enter_async_context(streaming(client))
        with still:
            await until_asked(server, MODEL, count)
            yield opened
            await opened.aclose()


async def taken(server: Server, client: httpx2.AsyncClient, beside: int) -> asyncio.Task[httpx2.Response]:
    """A short request that is taken while so many others are."""
    task = asyncio.create_task(client.post(CHAT, json=SHORT))
    await until_asked(server, MODEL, beside + 1)
    return task


async def answers(client: httpx2.AsyncClient, body: dict[str, Any] = SHORT) -> bool:
    return (await client.post(CHAT, json=body)).status_code == 200


async def until_answered(client: httpx2.AsyncClient, body: dict[str, Any] = SHORT, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not await answers(client, body):
        assert time.monotonic() < deadline

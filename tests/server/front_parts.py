"""What tests of several API processes share: which there are, and a client that is known to talk to a certain one."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import psutil
from key_clients import client_with
from process_parts import title

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2
    from serving import Server

TWO = {"HEARTH_API_PROCESSES": "2"}


def fronts(server: Server) -> list[psutil.Process]:
    """The API processes that live, the oldest first."""
    return [child for child in psutil.Process(server.pid).children() if "server.front" in title(child)]


async def pid_behind(server: Server, client: httpx2.AsyncClient) -> int:
    """The process at the other end of the connection that the client keeps."""
    response = await client.get("/health/live")
    port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    for front in fronts(server):
        if any(open_.raddr and open_.raddr.port == port for open_ in front.net_connections("tcp")):
            return front.pid
    raise AssertionError(f"Nobody has the connection from port {port}.")


@asynccontextmanager
async def client_each(server: Server, key: str) -> AsyncIterator[dict[int, httpx2.AsyncClient]]:
    """A client per API process, by its process id. The kernel chooses, so some are opened for nothing."""
    async with AsyncExitStack() as stack:
        found: dict[int, httpx2.AsyncClient] = {}
        for _ in range(64):
            client = await stack.enter_async_context(client_with(server, key))
            found.setdefault(await pid_behind(server, client), client)
            if len(found) == len(fronts(server)):
                break
        assert len(found) == 2, found
        yield found

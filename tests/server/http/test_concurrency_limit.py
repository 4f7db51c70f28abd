"""The bound on requests that run at once: who has a share is refused, who has none yet is not."""

from __future__ import annotations

import asyncio
from typing import Any

from server.http.middleware import ConcurrencyLimit
from server.observability.access_log import RequestRecord

MOST = 6


class App:
    """A limit before an app that holds every request until the door is opened."""

    def __init__(self) -> None:
        self.door = asyncio.Event()
        self.limit = ConcurrencyLimit(self._app, MOST)
        self.sent: list[dict[str, Any]] = []
        self.running: list[asyncio.Task[None]] = []

    async def _app(self, _: Any, __: Any, ___: Any) -> None:
        await self.door.wait()

    async def ask(self, key: str | None, path: str = "/v1/models") -> dict[bytes, bytes] | None:
        """Send a request; the headers of its refusal, None if it runs."""
        record = RequestRecord("req_1", "GET", None, key=key)
        scope = {"type": "http", "path": path, "state": {"record": record}}
        before = len(self.sent)
        task = asyncio.create_task(self.limit(scope, self._nothing, self._send))
        await asyncio.sleep(0)
        self.running.append(task)
        if len(self.sent) == before:
            return None
        start = self.sent[before]
        assert (start["status"], record.error_code) == (503, "server_overloaded")
        return dict(start["headers"])

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def _nothing(self) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.door.set()
        await asyncio.gather(*self.running)
        assert self.limit._running.owners == 0
        assert self.limit._running.total == 0


async def test_a_flood_is_refused_and_a_neighbour_gets_a_share_all_the_same():
    app = App()
    assert [await app.ask("flooder") for _ in range(MOST)] == [None] * MOST
    refusal = await app.ask("flooder")
    assert refusal is not None
    assert int(refusal[b"retry-after"]) >= 1
    assert [await app.ask("neighbour") for _ in range(MOST // 2)] == [None] * (MOST // 2)
    assert await app.ask("neighbour") is not None
    assert await app.ask("third") is None
    await app.close()


async def test_what_has_ended_makes_room_and_health_is_always_answered():
    app = App()
    for _ in range(MOST):
        await app.ask("one")
    assert await app.ask(None, "/health/ready") is None
    app.running.pop(0).cancel()
    await asyncio.sleep(0)
    assert await app.ask("one") is None
    assert await app.ask("one") is not None
    await app.close()

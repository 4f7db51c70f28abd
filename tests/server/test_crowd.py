"""The bound on requests that run at once: who has a share is refused, who has none yet is not."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.admission.in_flight import InFlight
from server.access_log import RequestRecord
from server.crowd import Crowd

MOST = 6


class House:
    """A crowd before an app that holds every request until the door is opened."""

    def __init__(self) -> None:
        self.door = asyncio.Event()
        self.crowd = Crowd(self._app, MOST, InFlight())
        self.sent: list[dict[str, Any]] = []
        self.running: list[asyncio.Task[None]] = []

    async def _app(self, _: Any, __: Any, ___: Any) -> None:
        await self.door.wait()

    async def ask(self, key: str | None, path: str = "/v1/models") -> dict[bytes, bytes] | None:
        """Send a request; the headers of its refusal, None if it runs."""
        record = RequestRecord("req_1", "GET", None, key=key)
        scope = {"type": "http", "path": path, "state": {"record": record}}
        before = len(self.sent)
        task = asyncio.create_task(self.crowd(scope, self._nothing, self._send))
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
        assert self.crowd._running.owners == 0
        assert self.crowd._running.total == 0


async def test_a_flood_is_refused_and_a_neighbour_gets_a_share_all_the_same():
    house = House()
    assert [await house.ask("flooder") for _ in range(MOST)] == [None] * MOST
    refusal = await house.ask("flooder")
    assert refusal is not None
    assert int(refusal[b"retry-after"]) >= 1
    assert [await house.ask("neighbour") for _ in range(MOST // 2)] == [None] * (MOST // 2)
    assert await house.ask("neighbour") is not None
    assert await house.ask("third") is None
    await house.close()


async def test_what_has_ended_makes_room_and_health_is_always_answered():
    house = House()
    for _ in range(MOST):
        await house.ask("one")
    assert await house.ask(None, "/health/ready") is None
    house.running.pop(0).cancel()
    await asyncio.sleep(0)
    assert await house.ask("one") is None
    assert await house.ask("one") is not None
    await house.close()

"""The bound on requests that run at once: who has a share is refused, who has none yet is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from server.http.disconnect import Drain
from server.http.middleware import Gate
from server.observability.access_log import RequestRecord
from server.store.database import Database
from server.store.key_cache import KeyCache
from server.store.keys import KeyStore
from server.store.sqlite import sqlite_url

MOST = 6
NAMES = ("flooder", "neighbour", "third")


class App:
    """The gate before an app that holds every request until the door is opened. `texts`: a key of each name."""

    def __init__(self, keys: KeyCache, texts: dict[str, str]) -> None:
        self.door = asyncio.Event()
        self.gate = Gate(self._app, MOST)
        self.sent: list[dict[str, Any]] = []
        self.running: list[asyncio.Task[None]] = []
        self._texts = texts
        self._state = SimpleNamespace(state=SimpleNamespace(drain=Drain(), keys=keys))

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator[App]:
        async with await Database.open(sqlite_url(folder / "keys.db")) as database:
            store = KeyStore(database)
            texts = {name: (await store.create(name, "standard"))[0] for name in NAMES}
            async with KeyCache(store) as keys:
                for text in texts.values():
                    assert await keys.authenticate(text)  # from now on without a wait
                app = cls(keys, texts)
                yield app
                app.door.set()
                await asyncio.gather(*app.running, return_exceptions=True)
                assert not app.gate._running
                assert app._state.state.drain.running == 0

    async def _app(self, _: Any, __: Any, ___: Any) -> None:
        await self.door.wait()

    async def ask(self, name: str | None, path: str = "/v1/models") -> dict[bytes, bytes] | None:
        """Send a request; the headers of its refusal, None if it runs."""
        record = RequestRecord("req_1", "GET", None)
        headers = [] if name is None else [(b"authorization", f"Bearer {self._texts[name]}".encode())]
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "state": {"record": record}}
        before = len(self.sent)
        task = asyncio.create_task(self.gate(scope | {"app": self._state}, self._nothing, self._send))
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


async def test_a_flood_is_refused_and_a_neighbour_gets_a_share_all_the_same(tmp_path):
    async with App.open(tmp_path) as app:
        assert [await app.ask("flooder") for _ in range(MOST)] == [None] * MOST
        refusal = await app.ask("flooder")
        assert refusal is not None
        assert int(refusal[b"retry-after"]) >= 1
        assert [await app.ask("neighbour") for _ in range(MOST // 2)] == [None] * (MOST // 2)
        assert await app.ask("neighbour") is not None
        assert await app.ask("third") is None


async def test_what_has_ended_makes_room_and_health_is_always_answered(tmp_path):
    async with App.open(tmp_path) as app:
        for _ in range(MOST):
            await app.ask("flooder")
        assert await app.ask(None, "/health/ready") is None
        app.running.pop(0).cancel()
        await asyncio.sleep(0)
        assert await app.ask("flooder") is None
        assert await app.ask("flooder") is not None

"""What open loops share: sending at moments fixed beforehand, over connections that are kept for the next request."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from benchmarks.errors import BenchError
from benchmarks.http_answers import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence


async def at_moments(moments: Sequence[float], send: Callable[[int, float], Awaitable[None]]) -> None:
    """Call `send(number, moment)` at each moment (seconds from now), whatever has become of earlier ones.

    The moment is handed over on the clock of `time.perf_counter`. Returns when all are done; raises the first
    `BenchError`.
    """
    start = time.perf_counter()

    async def one(number: int, moment: float) -> None:
        await asyncio.sleep(moment - time.perf_counter())
        await send(number, moment)

    try:
        async with asyncio.TaskGroup() as all_of_them:
            for number, moment in enumerate(moments):
                all_of_them.create_task(one(number, start + moment))
    except* BenchError as failed:
        raise failed.exceptions[0] from None


class Pool:
    """Connections to one server, as many as requests are in flight at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: list[Connection] = []

    @classmethod
    async def open(cls, host: str, port: int, connections: int) -> Pool:
        """Connect that often. Raises `AnswerError`."""
        pool = cls(host, port)
        pool._idle = [await Connection.open(host, port) for _ in range(connections)]
        return pool

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection for one request; one whose request failed is closed. Raises `AnswerError`."""
        while self._idle and not self._idle[-1].usable:  # the server closes what rests for long
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await Connection.open(self._host, self._port)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> None:
        """Close those that are not lent."""
        for connection in self._idle:
            connection.close()

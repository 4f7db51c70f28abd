"""What the authentication step costs, and whether its answers' times tell a known key id from an unknown one."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.errors import BenchError
from benchmarks.figures import milliseconds, percentile
from benchmarks.http_answers import Connection
from benchmarks.keys_made import unknown_key, wrong_secret
from benchmarks.keys_server import KEY_PATH, OPEN_PATH
from server.access_log import RequestRecord
from server.middleware import Authentication
from server.store import Database, KeyCache, KeyStore, sqlite_url
from server.store.sqlite import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from benchmarks.figures import Figures
    from benchmarks.hearth import HearthServer
    from benchmarks.workplace import Workplace

_Call: TypeAlias = "Callable[[], Awaitable[Any]]"

CACHE, STEP, NO_STEP = "key cache, hit", "whole step", "no step"
WITH_KEY, OPEN = "with the step", "without"
WRONG, UNKNOWN = "wrong secret", "unknown id"
_WARM = 100
_REFUSED = 401


async def step_in_process(place: Workplace, key: str, samples: int) -> dict[str, Figures]:
    """Call the step itself, with nothing around it: per call, in milliseconds."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        pass

    async with (
        await Database.open(sqlite_url(place.folder / "data" / FILE_NAME)) as database,
        KeyCache(KeyStore(database)) as keys,
    ):
        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]
        state: dict[str, Any] = {"record": RequestRecord("req_bench", "GET", None)}
        scope = {
            "type": "http",
            "method": "GET",
            "path": KEY_PATH,
            "headers": headers,
            "app": SimpleNamespace(state=SimpleNamespace(keys=keys)),
            "state": state,
        }
        step = Authentication(answer)
        calls: dict[str, _Call] = {
            CACHE: lambda: keys.authenticate(key),
            STEP: lambda: step(scope, _receive, _send),
            NO_STEP: lambda: answer(scope, _receive, _send),
        }
        seen = await _interleaved(calls, samples)
    if "key" not in state:
        raise BenchError("The authentication step let no key in. Is the data directory the one of the keys?")
    return {name: call_figures(values) for name, values in seen.items()}


async def step_over_http(server: HearthServer, key: str, samples: int) -> dict[str, Figures]:
    """Ask the same handler at a path that needs a key and at one that does not, over one connection."""
    connection = await Connection.open(server.host, server.port)
    requests = {name: get(path, key, server.host) for name, path in ((WITH_KEY, KEY_PATH), (OPEN, OPEN_PATH))}

    async def ask(name: str) -> None:
        answer = await connection.ask(requests[name])
        if answer.status != 200:
            raise BenchError(f"A request that must succeed was answered with status {answer.status}.")

    try:
        seen = await _interleaved({WITH_KEY: lambda: ask(WITH_KEY), OPEN: lambda: ask(OPEN)}, samples)
    finally:
        connection.close()
    return {name: call_figures(values) for name, values in seen.items()}


async def refusal_times(server: HearthServer, known: Sequence[str], samples: int) -> dict[str, list[float]]:
    """Return how many seconds refusals took: `samples` in all, wrong secrets and unknown ids, as chance has it.

    No text is sent twice, since the server remembers for a while what it refused.
    """
    connection = await Connection.open(server.host, server.port)

    async def ask(text: str) -> None:
        answer = await connection.ask(get(KEY_PATH, text, server.host))
        if answer.status != _REFUSED:
            raise BenchError(f"A key that nobody has was answered with status {answer.status}.")

    # Made beforehand: what a text costs to make must not be part of its time, or follow it.
    half = samples // 2 + _WARM
    texts = {
        WRONG: iter([wrong_secret(random.choice(known)) for _ in range(half)]),  # noqa: S311  # no secret
        UNKNOWN: iter([unknown_key() for _ in range(half)]),
    }
    calls = {WRONG: lambda: ask(next(texts[WRONG])), UNKNOWN: lambda: ask(next(texts[UNKNOWN]))}
    try:
        return await _interleaved(calls, samples // 2)
    finally:
        connection.close()


def get(path: str, key: str, host: str) -> bytes:
    """Return a GET, ready to be written."""
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


def call_figures(seconds: Sequence[float]) -> Figures:
    """Put times of single calls into figures."""
    return {
        "p50_ms": milliseconds(percentile(seconds, 50)),
        "p95_ms": milliseconds(percentile(seconds, 95)),
        "p99_ms": milliseconds(percentile(seconds, 99)),
        "calls": len(seconds),
    }


async def _interleaved(calls: Mapping[str, _Call], samples: int) -> dict[str, list[float]]:
    """Make each call `samples` times, in an order that chance decides; return what each took in seconds."""
    order = [name for name in calls for _ in range(samples)]
    random.shuffle(order)
    for call in calls.values():
        for _ in range(_WARM):
            await call()
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for name in order:
        call = calls[name]
        began = time.perf_counter()
        await call()
        seen[name].append(time.perf_counter() - began)
    return seen


async def _receive() -> Any:
    return {"type": "http.request"}


async def _send(message: Any) -> None:
    pass

"""Races work against the client's leaving and the server's end, so that an answer nobody waits for is not made."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request
    from starlette.types import Receive

    from server.drain import Drain

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client left. Nobody reads the answer; the access log says 499."""


def shutting_down() -> ApiError:
    """What a request gets that the end of the server cuts off, or that comes too late."""
    return ApiError(
        503,
        "server_overloaded",
        "This server is shutting down. Try again in a few seconds.",
        type="server_error",
        headers={"Retry-After": "5", "Connection": "close"},
    )


async def until_hangup(work: Coroutine[Any, Any, _T], receive: Receive, drain: Drain) -> _T:
    """Await `work`; if the client leaves or the drain expires, cancel it first and wait until it has ended.

    The body must have been read: then the only message left to `receive` is the disconnect.
    Raises `ClientGoneError`, or the `ApiError` of a server that shuts down, or what `work` raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone, drain.expired), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        await _cancel(task)
        await _cancel(gone)
    raise shutting_down() if drain.expired.done() else ClientGoneError


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen: asyncio does not complain about it


async def client_gone(_: Request, __: Exception) -> Response:
    """Close the books on a request whose client left; nobody receives this."""
    return Response(status_code=499)

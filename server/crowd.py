"""Bounds how many requests run at once in this process, before anything is read of them, fairly between keys.

What a key may have running at most is limits.py's, who waits for a model the engine's: this is for the flood beyond all
of that, which costs least where it is refused first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.errors import ApiError
from server.middleware import OPEN_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from engine.admission.in_flight import InFlight
    from server.access_log import RequestRecord


class Crowd:
    """Stands behind the authentication. Who came without a key counts as one."""

    def __init__(self, app: ASGIApp, most: int, running: InFlight) -> None:
        self._app = app
        self._most = most
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it; other scopes pass through."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        if self._running.has_share(record.key, self._most):
            error = crowded()
            record.error_code = error.code
            await error.response()(scope, receive, send)
            return
        with self._running.one_more(record.key):
            await self._app(scope, receive, send)


def crowded() -> ApiError:
    """Make the error of whom this refuses."""
    return ApiError(
        503,
        "server_overloaded",
        "Too many requests run here at the same time. Try again in a few seconds, or send fewer at once.",
        type="server_error",
        headers={"Retry-After": "5"},
    )

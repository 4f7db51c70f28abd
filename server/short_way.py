"""The short way to routes that have a plan, past the layers that FastAPI and Starlette put around every request.

What has no plan, or no route, goes on to them. What they do for an exception is done here, when there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from server.bodies import StrictRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from server.access_log import RequestRecord


class ShortWay:
    """Goes before `app`, which has these routes, too. `handlers` answer exceptions: of each class, or of its parent."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], handlers: Mapping[Any, Callable[..., Any]]) -> None:
        self._app = app
        self._handlers = handlers
        self._routes: dict[tuple[str, str], StrictRoute] = {}
        for route in routes:
            if isinstance(route, StrictRoute) and route.plan is not None:
                self._routes |= {(method, route.path): route for method in route.methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other scopes pass through."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route  # as the router would say it, for the access log
        request = Request(scope, receive, send)
        try:
            response = await route.answer(request)
            await response(scope, receive, send)
        except Exception as error:  # noqa: BLE001  # all have a handler
            handler = next(self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers)
            response = await handler(request, error)
            record: RequestRecord = scope["state"]["record"]
            if record.status is None:  # else it has begun, and nothing more can be said
                await response(scope, receive, send)

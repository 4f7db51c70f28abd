"""How a replica speaks HTTP: itself, as one server does, behind the HAProxy that Ray runs on every machine.

Serve's own proxy is a Python process that each piece of an answer would have to pass. HAProxy sends requests to the
replicas' own ports. Serve would listen there with plain uvicorn: `speak` has it use our protocol, so that limits,
errors and writes are those of one server.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import StartError as ModelError
from server.app import HearthApp
from server.cluster.compat import HAS_HAPROXY, HAS_TWO_LOOPS, TIMEOUT, UNWATCHED, listen_by
from server.http.protocol import Connection, http_config
from server.serve import StartError, listen
from server.settings import SettingsError

_FOR_SERVE = {TIMEOUT.encode(), UNWATCHED.encode()}
_HEALTH = "/-/healthz"  # what HAProxy asks
# Where Serve watches for clients that leave, it reads their bodies, however large, and before we look at the key.
_UNWATCHED = (UNWATCHED.encode(), b"?1")


def check_environment() -> None:
    """Refuse to run where Serve's Python proxy would pass the requests on. Raises `SettingsError`."""
    if not HAS_HAPROXY or HAS_TWO_LOOPS:
        raise SettingsError(
            "Ray was started without what Hearth needs of it (RAY_SERVE_ENABLE_HA_PROXY=1 and others). Start every "
            "machine with `hearth cluster up`; on Kubernetes set the variables of docker/kuberay.yaml."
        )


def speak(app: HearthApp, address: str) -> None:
    """Have the replica of this process listen by our protocol, once it is ready. Serve says at which port."""

    async def start(
        serve: ASGIApp, options: Any, *, event_loop: asyncio.AbstractEventLoop, **_: Any
    ) -> tuple[asyncio.Task[None], uvicorn.Server]:
        every = "::" if ":" in address else "0.0.0.0"  # noqa: S104  # HAProxy comes from other machines, too
        try:
            listener = listen(app.state.settings.model_copy(update={"host": every, "port": options.port}))
        except StartError as error:
            raise RuntimeError(str(error)) from error.__cause__  # Serve takes another port then
        app.state.base_url = f"http://{address}:{options.port}/v1"
        server = _Server(app, serve)
        return event_loop.create_task(server.serve(sockets=[listener])), server

    listen_by(start)


class _Server(uvicorn.Server):
    def __init__(self, app: HearthApp, serve: ASGIApp) -> None:
        self._app = app
        config = http_config(_Entrance(app, serve), app.state.settings, None)
        config.lifespan = "off"
        config.timeout_graceful_shutdown = None
        super().__init__(config)

    async def shutdown(self, sockets: Any = None) -> None:
        """Let what runs finish, and end what has not after the time for it with an error event."""
        state = self._app.state
        draining = asyncio.create_task(state.drain.drain(state.settings.drain_seconds))
        await super().shutdown(sockets)
        await draining


class _Entrance:
    """Serve's entrance, where requests are counted for autoscaling and the drain. It ends in `OwnHttp`."""

    def __init__(self, app: HearthApp, serve: ASGIApp) -> None:
        self.state = app.state
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _HEALTH:
            # Serve says no as soon as this replica is to end, and HAProxy left it before it knew its successor. It
            # answers as long as it listens; one that no longer does is not tried twice.
            with suppress(ModelError):
                self.state.engine.check()
                await Response()(scope, receive, send)
                return
        headers = [header for header in scope["headers"] if header[0] not in _FOR_SERVE]
        await self._serve({**scope, "headers": [*headers, _UNWATCHED]}, receive, send)


class OwnHttp:
    """The app, for Serve: also for what HAProxy sends through Serve's Python proxy while it knows of no replica."""

    def __init__(self, app: HearthApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the lifespan is the replica's
            scope.setdefault("hearth.connection", _Proxied())
            await self._app(scope, receive, send)


class _Proxied(Connection):
    """Stands for the connection of a request that Serve's proxy passes on, and cancels when its client leaves."""

    def __init__(self) -> None: ...

    def can_write(self) -> bool:
        return False

    def end_with_connection(self) -> None: ...

    def last_comes(self, size: int) -> None: ...

    def watch(self, on_disconnect: Callable[[], None] | None) -> None: ...

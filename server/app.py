"""Puts the HTTP side together: routes, middleware, errors, and what lives as long as the server does."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from engine import Config, Engine
from server import errors
from server.access_log import open_access_log
from server.dependencies import Access
from server.drain import Drain
from server.hangup import ClientGoneError, client_gone
from server.middleware import Authentication, Gate, RequestContext
from server.routes import batch, chat, health, models
from server.store import Database, KeyCache, KeyStore, sqlite_url
from server.store.database import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp

    from server.settings import Settings


class HearthApp(FastAPI):
    """FastAPI with our middleware outside of its own, so that also its last-resort answers pass through ours."""

    def build_middleware_stack(self) -> ASGIApp:
        """Wrap the app: first the request's id and access line, then the server's end, then the key."""
        return RequestContext(Gate(Authentication(super().build_middleware_stack())))


def create_app(settings: Settings, config: Config) -> HearthApp:
    """Make the app. Its lifespan opens the store and starts the engine; `app.state` holds both from then on."""
    app = HearthApp(
        title="Hearth",
        version="1.0.0",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        redirect_slashes=False,  # no redirect that a request's Host header could lead elsewhere
    )
    app.state.settings = settings
    app.state.config = config
    app.state.terminate = False
    errors.install(app)
    app.add_exception_handler(ClientGoneError, client_gone)
    for module in (chat, batch, models, health):
        app.include_router(module.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Engines end here and not after `serve()`: uvicorn may never come back from that."""
    settings: Settings = app.state.settings
    log = open_access_log(settings.data_dir / "logs")
    engine = Engine(app.state.config, weights_dir=settings.weights_dir)
    app.state.drain = Drain()
    app.state.engine = engine
    app.state.access = Access(app.state.config, engine)
    try:
        async with (
            await Database.open(sqlite_url(settings.data_dir / FILE_NAME)) as database,
            KeyCache(KeyStore(database)) as keys,
        ):
            app.state.keys = keys
            await engine.start()
            try:
                yield
            finally:
                await (engine.terminate() if app.state.terminate else engine.stop())
    finally:
        log.stop()

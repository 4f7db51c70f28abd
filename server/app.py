"""Puts the HTTP side together: routes, middleware, errors, and what lives as long as the server does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from engine import Config, Engine, ImageLimits
from engine.admission.in_flight import InFlight
from server import errors
from server.access_log import AccessLog
from server.cors import Cors
from server.crowd import Crowd
from server.dependencies import Access
from server.drain import Drain
from server.hangup import ClientGoneError, client_gone
from server.image_files import ImageFiles
from server.image_folder import ImageFolder
from server.image_links import ImageLinks
from server.image_quota import ImageQuota
from server.key_admin import KeyAdmin
from server.limits import Limiter
from server.live_keys import LiveKeys
from server.meter import Meter
from server.metering import MeteredEngine
from server.metrics import Metrics
from server.metrics_page import KeptPage
from server.middleware import Authentication, Gate, RequestContext
from server.openapi import describe
from server.routes import (
    admin,
    admin_keys,
    audio,
    batch,
    chat,
    completions,
    health,
    images,
    messages,
    metrics,
    models,
    responses,
    usage,
)
from server.settings import database_url
from server.store import Buckets, Database, KeyStore, Quotas, UsageBook

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from types import ModuleType

    from starlette.types import ASGIApp

    from server.settings import Settings


_ROUTES = (
    chat,
    messages,
    responses,
    completions,
    batch,
    images,
    audio,
    models,
    usage,
    admin_keys,
    admin,
    health,
    metrics,
)


class HearthApp(FastAPI):
    """FastAPI with our middleware outside of its own, so that also its last-resort answers pass through ours."""

    def build_middleware_stack(self) -> ASGIApp:
        """Wrap the app: first the request's id and access line, then web pages, the end, the key, the crowd."""
        settings: Settings = self.state.settings
        routed = super().build_middleware_stack()
        app: ASGIApp = Gate(Authentication(Crowd(routed, settings.max_running_requests, self.state.crowd)))
        origins = settings.cors_origins
        return RequestContext(Cors(app, origins) if origins else app)

    def openapi(self) -> dict[str, Any]:
        """Return the description of the API, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = describe(super().openapi())
        return self.openapi_schema


def create_app(settings: Settings, config: Config) -> HearthApp:
    """Make the app. Its lifespan opens the store and starts the engine; `app.state` holds both from then on."""
    app = bare_app(settings, _ROUTES, _lifespan)
    app.state.config = config
    app.state.base_url = None  # known to whoever listens
    app.state.certificate = None  # theirs, too
    app.state.terminate = False
    app.state.metrics = Metrics(lambda: app.state.config.models)
    app.state.metrics_page = KeptPage()
    app.state.fronts = None  # of whoever listens, where there are some
    return app


def bare_app(settings: Settings, routes: Iterable[ModuleType], lifespan: Any = None) -> HearthApp:
    """Make an app of these routes, with our middleware and errors; what they need in `app.state` is still to come."""
    app = HearthApp(
        title="Hearth",
        version="1.0.0",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        redirect_slashes=False,  # no redirect that a request's Host header could lead elsewhere
    )
    app.state.settings = settings
    app.state.crowd = InFlight()
    errors.install(app)
    app.add_exception_handler(ClientGoneError, client_gone)
    for module in routes:
        app.include_router(module.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Engines end here and not after `serve()`: uvicorn may never come back from that."""
    settings: Settings = app.state.settings
    app.state.access_log = AccessLog(settings.data_dir / "logs")
    engine = Engine(
        app.state.config,
        weights_dir=settings.weights_dir,
        data_dir=settings.data_dir,
        images=_image_limits(settings),
        mark_files=settings.image_mark,
        ram_gib=settings.ram_gib,
        vllm_metrics=settings.vllm_metrics,
    )
    app.state.drain = Drain()
    app.state.engine = engine
    app.state.access = Access(app.state.config, engine)
    try:
        async with (
            await Database.open(database_url(settings)) as database,
            LiveKeys(KeyStore(database)) as keys,
            Buckets(database) as buckets,
            UsageBook(database) as book,
            ImageQuota(Quotas(database)) as image_quota,
            ImageFiles(_image_folder(settings)) as image_files,
        ):
            app.state.database = database
            app.state.keys = keys
            app.state.key_admin = KeyAdmin(keys, lambda: app.state.config)
            app.state.reloading = asyncio.Lock()
            app.state.meter = Meter(Limiter(app.state.config, buckets), book, image_quota, app.state.metrics)
            app.state.engine_for = partial(MeteredEngine, engine, app.state.meter)
            app.state.image_files = image_files
            app.state.image_links = ImageLinks.open(settings.data_dir)
            await engine.start()
            try:
                yield
            finally:
                await (engine.terminate() if app.state.terminate else engine.stop())
    finally:
        app.state.access_log.close()


def _image_folder(settings: Settings) -> ImageFolder:
    return ImageFolder(
        settings.data_dir / "images",
        retention_seconds=settings.image_retention_hours * 3600,
        max_bytes=int(settings.image_folder_gib * 2**30),
    )


def _image_limits(settings: Settings) -> ImageLimits:
    fetch = None
    if settings.fetch_images:
        from server.image_fetch import ImageFetcher  # a web client that few need

        fetch = ImageFetcher(settings.max_image_bytes)
    return ImageLimits(settings.max_image_bytes, settings.max_image_megapixels, fetch)

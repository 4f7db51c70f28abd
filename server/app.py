"""Makes the app: routes, middleware, errors, and the objects that live as long as the server does."""

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from engine import Config, Engine, ImageLimits
from server import errors
from server.api import batches, chat, embeddings, key, messages, openapi, responses
from server.api.admin import commands
from server.api.admin import keys as admin_keys
from server.api.admin import routes as admin
from server.api.admin.commands import Commands
from server.api.admin.keys import KeyAdmin
from server.api.audio import routes as audio
from server.api.audio import transcriptions
from server.api.batches import EndpointLines, LineEndpoint
from server.api.images import routes as images
from server.api.images.files import BucketImages, ImageFiles, ImageLinks
from server.auth.access import Access
from server.auth.metering import Meter
from server.auth.sessions import OnceLinks, Sessions, SignIns
from server.batches.folder import BucketFolder, Folder
from server.batches.runner import BatchLimits, Runner
from server.console import routes as console
from server.http.bodies import Bodies
from server.http.disconnect import ClientDisconnectedError, Drain, client_disconnected
from server.http.middleware import Cors, Gate, RequestContext
from server.observability.access_log import AccessLog
from server.observability.metrics import PAGE_SECONDS, Kept, Metrics
from server.observability.status_server import INSPECTED_SECONDS, Inspection, Lately, Peers
from server.observability.tracing import Tracing
from server.settings import Settings, database_url, files_bucket, files_folder, reserve_bytes
from server.store.batches import BatchStore
from server.store.database import Database, shared_key
from server.store.key_cache import KeyCache
from server.store.keys import KeyStore, SessionStore
from server.store.limits import Buckets, Quotas, Replicas
from server.store.objects import Bucket
from server.store.usage import UsageBook

_ROUTES = (
    chat.router,
    messages.router,
    responses.router,
    batches.files,
    batches.router,
    embeddings.router,
    images.router,
    images.forms,
    audio.router,
    transcriptions.router,
    key.router,
    admin_keys.usage,
    admin_keys.router,
    admin.router,
    commands.router,
    admin.probes,
    openapi.router,
    console.root,
)
# The endpoints that lines of a batch may name.
_LINE_ENDPOINTS = {
    "/v1/chat/completions": LineEndpoint(chat.answer_chat_line),
    "/v1/completions": LineEndpoint(chat.answer_completion_line),
    "/v1/responses": LineEndpoint(responses.answer_line),
    "/v1/embeddings": LineEndpoint(embeddings.answer_line, scope="embeddings"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an app in a cluster. Without arguments it is a single server with all models.

    `engine` makes its engine, called like `Engine`. `name` is unique among the servers of one database; None: random.
    An app that does not speak HTTP gets its requests from others, and runs no batches. `peers` are all replicas.
    """

    engine: Callable[..., Engine] = Engine
    name: str | None = None
    speaks_http: bool = True
    peers: Peers | None = None


class HearthApp(FastAPI):
    """FastAPI with our middleware outside of its own, so that its last-resort answers pass through ours, too."""

    def build_middleware_stack(self) -> ASGIApp:
        settings: Settings = self.state.settings
        routed = super().build_middleware_stack()
        return RequestContext(Cors(Gate(routed, settings.max_running_requests), settings.cors_origins))

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.describe(super().openapi())
        return self.openapi_schema


def create_app(settings: Settings, config: Config, place: Place = Place()) -> HearthApp:  # frozen
    """Make the app. Its lifespan opens the store and starts the engine; `app.state` holds both from then on."""
    app = HearthApp(
        title="Hearth",
        version=importlib.metadata.version("hearth-inference"),
        lifespan=partial(_lifespan, config),
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        redirect_slashes=False,  # no redirect that a request's Host header could lead elsewhere
    )
    app.state.settings = settings
    app.state.place = place
    app.state.base_url = app.state.certificate = None  # known once a socket listens
    app.state.terminate = False
    app.state.tracing = None
    app.state.bodies = Bodies(settings.max_bodies_bytes)
    app.state.metrics = Metrics(config.entries)
    app.state.lately = Lately(app.state.metrics)
    app.state.metrics_page, app.state.status_page = Kept[bytes](PAGE_SECONDS), Kept[bytes](PAGE_SECONDS)
    app.state.inspection = Kept[Inspection](INSPECTED_SECONDS)
    app.state.once_links, app.state.sign_ins = OnceLinks(), SignIns()
    errors.install(app)
    app.add_exception_handler(ClientDisconnectedError, client_disconnected)
    for router in _ROUTES:
        app.include_router(router)
    if settings.console:
        app.include_router(console.router)
    return app


@asynccontextmanager
async def _lifespan(config: Config, app: FastAPI) -> AsyncIterator[None]:
    """Open and close all that the app uses. Engines end here, because uvicorn's `serve()` may never return."""
    settings: Settings = app.state.settings
    app.state.access_log = AccessLog(settings.data_dir / "logs")
    tracing = app.state.tracing = Tracing.open(app.state.metrics, key_ids=settings.trace_key_ids)
    place: Place = app.state.place
    engine = place.engine(
        config,
        weights_dir=settings.weights_dir,
        data_dir=settings.data_dir,
        images=_image_limits(settings),
        mark_files=settings.image_mark,
        ram_gib=settings.ram_gib,
        prefer=settings.prefer,
        vllm_metrics=settings.vllm_metrics,
    )
    app.state.drain = Drain()
    app.state.engine = engine
    app.state.access = Access(engine)
    logging.getLogger("hearth").addHandler(app.state.lately)
    try:
        async with (
            await Database.open(database_url(settings)) as database,
            database.watched(),
            KeyCache(KeyStore(database), stale_seconds=settings.key_stale_seconds) as keys,
            Buckets(database) as buckets,
            UsageBook(database) as book,
            Quotas(database) as quotas,
            Replicas(database, place.name) as replicas,
            _image_files(settings) as image_files,
        ):
            app.state.database = database
            app.state.keys = keys
            app.state.sessions = Sessions(SessionStore(database, keys.store), keys)
            app.state.key_admin = KeyAdmin(keys, engine)
            app.state.reloading = asyncio.Lock()
            app.state.commands = Commands(settings)
            app.state.meter = Meter(buckets, quotas, book, app.state.metrics, replicas)
            app.state.image_files = image_files
            app.state.image_links = await _image_links(database, settings.data_dir)
            app.state.batch_runner = None
            app.state.recordings = Folder(settings.data_dir / "recordings", kept_free_bytes=reserve_bytes(settings))
            await app.state.recordings.open()
            await engine.start()
            try:
                async with _batch_runner(app, settings) if place.speaks_http else nullcontext():
                    yield
            finally:
                try:
                    await app.state.commands.stop()
                finally:
                    await (engine.terminate() if app.state.terminate else engine.stop())
    finally:
        logging.getLogger("hearth").removeHandler(app.state.lately)
        app.state.access_log.close()
        if tracing is not None:
            tracing.close()


def _batch_folder(settings: Settings) -> Folder:
    kept_free_bytes = reserve_bytes(settings)
    if (bucket := files_bucket(settings)) is not None:
        return BucketFolder(settings.data_dir / "copies", Bucket(bucket), kept_free_bytes=kept_free_bytes)
    shared = files_folder(settings)
    path = shared or settings.data_dir / "batches"
    return Folder(path, kept_free_bytes=kept_free_bytes, shared=shared is not None)


def _image_files(settings: Settings) -> ImageFiles:
    limits = (settings.image_retention_hours * 3600, int(settings.image_folder_gib * 2**30))
    if (bucket := files_bucket(settings)) is not None:
        return BucketImages(Path("images"), *limits, shared=True, bucket=Bucket(bucket))
    shared = files_folder(settings)
    return ImageFiles((shared or settings.data_dir) / "images", *limits, shared=shared is not None)


async def _image_links(database: Database, data_dir: Path) -> ImageLinks:
    """Sign with the key of this data directory, or with the one that all servers of a PostgreSQL share."""
    links = await asyncio.to_thread(ImageLinks.open, data_dir)
    if database.kind == "postgresql":
        return ImageLinks(await shared_key(database, "image-links", links.key))
    return links


def _batch_runner(app: FastAPI, settings: Settings) -> Runner:
    state = app.state
    folder = _batch_folder(settings)
    store = BatchStore(state.database)
    limits = BatchLimits(
        most_lines=settings.max_batch_lines,
        most_line_bytes=settings.max_body_bytes,
        retention_seconds=settings.file_retention_days * 86400,
    )
    lines = EndpointLines(_LINE_ENDPOINTS, state.meter, state.access, settings)
    runner = Runner(store, folder, KeyStore(state.database), lines, limits, draining=lambda: state.drain.draining)
    state.batch_store, state.batch_folder, state.batch_runner = store, folder, runner
    return runner


def _image_limits(settings: Settings) -> ImageLimits:
    fetch = None
    if settings.fetch_images:
        from server.api.images.fetch import ImageFetcher  # imports an HTTP client that few servers need

        fetch = ImageFetcher(settings.max_image_bytes)
    return ImageLimits(settings.max_image_bytes, settings.max_image_megapixels, fetch)

"""What routes ask for: the engine, the settings, and a key that may do what the route does.

All of it is `async`, though nothing waits: FastAPI runs each plain function on a thread, at the price of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from engine import Config, Engine, ModelInfo
from server.auth.access import KeyIfSent, KeyWith
from server.auth.metering import Meter, MeteredEngine
from server.errors import ApiError
from server.http.disconnect import Drain
from server.observability.metrics import CachedPage, Metrics
from server.settings import Settings
from server.store import Actor, ApiKey, AuditLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def engine_of(request: Request) -> Engine:
    """Return the app's engine."""
    engine: Engine = request.app.state.engine
    return engine


async def settings_of(request: Request) -> Settings:
    """Return the app's settings."""
    settings: Settings = request.app.state.settings
    return settings


async def drain_of(request: Request) -> Drain:
    """Return the app's drain."""
    drain: Drain = request.app.state.drain
    return drain


def key_with(scope: str) -> KeyWith:
    """Make a dependency that gives the request's key if it has `scope`, and a 403 otherwise."""
    return KeyWith(scope)


def key_if_sent(scope: str) -> KeyIfSent:
    """Make a dependency like `key_with` for what a setting may open: None where no key was sent."""
    return KeyIfSent(scope)


async def any_key(request: Request) -> ApiKey:
    """Return the request's key, whatever it may do."""
    key: ApiKey = request.state.key
    return key


async def audit_of(request: Request) -> AuditLog:
    """Return the log of changes."""
    return AuditLog(request.app.state.database)


async def actor_of(request: Request) -> Actor:
    """Return who asks, for the log of changes."""
    return Actor(request.state.key.public_id, request.client.host if request.client else "unknown")


class Access:
    """Which models a key may use: those of its tier, and of its own list if it has one."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._engine = engine

    def use(self, config: Config) -> None:
        """From now on these are the tiers."""
        self._config = config

    def models(self, key: ApiKey) -> list[ModelInfo]:
        """Return what the key may use, in the order of models.yaml."""
        tier = self._config.tiers.get(key.tier)
        allowed = () if tier is None else tier.models
        return [
            model
            for model in self._engine.models()
            if model.tier in allowed and (key.models is None or model.id in key.models)
        ]

    def speech_models(self, key: ApiKey | None) -> list[ModelInfo]:
        """Return the models that speak, and that the key may use; without one, all of them."""
        models = self._engine.models() if key is None else self.models(key)
        return [model for model in models if "speech" in model.capabilities]

    def model(self, key: ApiKey, model: str) -> ModelInfo:
        """Return one model. An unknown one and one that the key may not use get the same answer."""
        for info in self.models(key):
            if info.id == model:
                return info
        raise _no_such_model()

    def check(self, key: ApiKey, model: str) -> None:
        """Raise like `model`, for whoever needs no more than to know that the key may use it."""
        spec, tier = self._config.models.get(model), self._config.tiers.get(key.tier)
        in_tier = spec is not None and tier is not None and spec.tier in tier.models
        if not in_tier or (key.models is not None and model not in key.models):
            raise _no_such_model()


def _no_such_model() -> ApiError:
    return ApiError(
        404,
        "model_not_found",
        "There is no such model, or your key may not use it. GET /v1/models lists the ones that you may use.",
        param="model",
    )


async def access_of(request: Request) -> Access:
    """Return the app's access rules."""
    access: Access = request.app.state.access
    return access


def metered(kind: str) -> Callable[[Request], Awaitable[MeteredEngine]]:
    """Make a dependency that gives the engine as this request's key may use it; `kind` names it in the usage book."""

    async def engine(request: Request) -> MeteredEngine:
        app, state = request.app.state, request.state
        return MeteredEngine(app.engine, app.meter, state.key, state.record, kind=kind)

    return engine


async def meter_of(request: Request) -> Meter:
    """Return what this process keeps of all keys."""
    meter: Meter = request.app.state.meter
    return meter


async def metrics_of(request: Request) -> Metrics:
    """Return what is counted for Prometheus."""
    metrics: Metrics = request.app.state.metrics
    return metrics


async def metrics_page_of(request: Request) -> CachedPage:
    """Return the page of these counts."""
    kept: CachedPage = request.app.state.metrics_page
    return kept


TheEngine = Annotated[Engine, Depends(engine_of)]
TheActor = Annotated[Actor, Depends(actor_of)]
TheAudit = Annotated[AuditLog, Depends(audit_of)]
TheMetricsPage = Annotated[CachedPage, Depends(metrics_page_of)]
TheMetrics = Annotated[Metrics, Depends(metrics_of)]
TheMeter = Annotated[Meter, Depends(meter_of)]
ChatEngine = Annotated[MeteredEngine, Depends(metered("chat"))]
BatchEngine = Annotated[MeteredEngine, Depends(metered("batch"))]
ImageEngine = Annotated[MeteredEngine, Depends(metered("images"))]
SpeechEngine = Annotated[MeteredEngine, Depends(metered("audio"))]
TheSettings = Annotated[Settings, Depends(settings_of)]
TheDrain = Annotated[Drain, Depends(drain_of)]
TheAccess = Annotated[Access, Depends(access_of)]

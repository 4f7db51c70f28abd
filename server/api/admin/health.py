"""`GET /health/live` and `GET /health/ready`: for load balancers and people, open without a key."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from engine import ANSWERS, ModelHealth
from server.api.dependencies import TheDrain, TheEngine

router = APIRouter(prefix="/health", tags=["health"])


@router.head("/live", include_in_schema=False)
@router.get("/live")
async def live() -> dict[str, str]:
    """Answer 200 as long as the process answers at all; never waits for an engine."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(engine: TheEngine, drain: TheDrain) -> JSONResponse:
    """Answer 200 when every model answers and the server is not ending, else 503; with the state of each model.

    A model that waits for its turn on memory that it shares answers, too: it is loaded when it is asked for.
    """
    models = engine.health()
    status = "draining" if drain.draining else _overall(models)
    body = {"status": status, "models": {health.id: _model(health) for health in models}}
    headers = {} if status == "ready" else {"Retry-After": "5"}
    return JSONResponse(body, 200 if status == "ready" else 503, headers)


def _overall(models: tuple[ModelHealth, ...]) -> Literal["ready", "loading", "failed"]:
    if all(health.status in ANSWERS for health in models):
        return "ready"
    return "failed" if any(health.status == "failed" for health in models) else "loading"


def _model(health: ModelHealth) -> dict[str, Any]:
    """With the reason of a failed one, but without the error's text: that is for the operator and may name files."""
    return {
        "status": health.status,
        "phase": health.phase,
        "progress": health.progress,
        "elapsed_seconds": health.elapsed_seconds,
        "remaining_seconds": health.remaining_seconds,
        "restarts": health.restarts,
        "reason": health.reason,
    }

"""What load balancers and Prometheus read: `GET /health/live` and `/health/ready`, open to all, and `GET /metrics`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from engine import ANSWERS, ModelHealth
from server.auth.access import KeyWith
from server.observability.metrics import CONTENT_TYPE, machine_gauges, page, server_gauges

router = APIRouter(tags=["health"])
# The reason of a failed model, but not the error's text: that is for the operator and may name files.
_SHOWN = ("status", "phase", "progress", "elapsed_seconds", "remaining_seconds", "restarts", "reason")


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live")
async def live() -> dict[str, str]:
    """Answer 200 as long as the process answers at all; never waits for an engine."""
    return {"status": "ok"}


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Answer 200 when every model answers and the server is not ending, else 503; with the state of each model.

    A model that waits for its turn on memory that it shares answers, too: it is loaded when it is asked for.
    """
    models: tuple[ModelHealth, ...] = request.app.state.engine.health()
    found = {health.status for health in models}
    if request.app.state.drain.draining:
        status = "draining"
    elif found <= ANSWERS:
        status = "ready"
    else:
        status = "failed" if "failed" in found else "loading"
    shown = {health.id: {name: getattr(health, name) for name in _SHOWN} for health in models}
    body = {"status": status, "models": shown}
    headers = {} if status == "ready" else {"Retry-After": "5"}
    return JSONResponse(body, 200 if status == "ready" else 503, headers)


@router.get("/metrics", response_class=Response, include_in_schema=False, dependencies=[Depends(KeyWith("metrics"))])
async def read_metrics(request: Request) -> Response:
    """Give everything that is counted, in Prometheus' text format; at most a second old."""
    state = request.app.state

    async def make() -> bytes:
        now = server_gauges(state.engine, state.drain)
        collectors = [state.metrics.registry, *state.engine.vllm_metrics()]
        now += await asyncio.to_thread(machine_gauges, state.settings)
        return await asyncio.to_thread(page, collectors, now)

    return Response(await state.metrics_page.read(make), headers={"content-type": CONTENT_TYPE})

"""`GET /metrics`: for Prometheus, with a key that has the scope `metrics`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from server.api.dependencies import TheDrain, TheEngine, TheSettings, of_app
from server.auth.access import KeyWith
from server.observability.metrics import CONTENT_TYPE, KeptPage, Metrics, machine, page, standing

router = APIRouter(tags=["metrics"], dependencies=[Depends(KeyWith("metrics"))])


@router.get("/metrics", response_class=Response, include_in_schema=False)
async def read_metrics(
    engine: TheEngine,
    drain: TheDrain,
    settings: TheSettings,
    metrics: Annotated[Metrics, Depends(of_app("metrics"))],
    kept: Annotated[KeptPage, Depends(of_app("metrics_page"))],
) -> Response:
    """Give everything that is counted, in Prometheus' text format; at most a second old."""

    async def make() -> bytes:
        now = standing(engine, drain)
        collectors = [metrics.registry, *engine.vllm_metrics()]
        now += await asyncio.to_thread(machine, settings)
        return await asyncio.to_thread(page, collectors, now)

    return Response(await kept.read(make), headers={"content-type": CONTENT_TYPE})

"""`GET /metrics`: for Prometheus, with a key that has the scope `metrics`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from server.api.dependencies import TheDrain, TheEngine, TheMetrics, TheMetricsPage, TheSettings, key_with
from server.observability.metrics import CONTENT_TYPE, machine_gauges, page, server_gauges

router = APIRouter(tags=["metrics"], dependencies=[Depends(key_with("metrics"))])


@router.get("/metrics", response_class=Response, include_in_schema=False)
async def read_metrics(
    engine: TheEngine, drain: TheDrain, metrics: TheMetrics, kept: TheMetricsPage, settings: TheSettings
) -> Response:
    """Give everything that is counted, in Prometheus' text format; at most a second old."""

    async def make() -> bytes:
        now = server_gauges(engine, drain)
        collectors = [metrics.registry, *engine.vllm_metrics()]
        now += await asyncio.to_thread(machine_gauges, settings)
        return await asyncio.to_thread(page, collectors, now)

    return Response(await kept.read(make), headers={"content-type": CONTENT_TYPE})

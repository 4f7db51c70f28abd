"""The state of the server and its changes: health, which is open to all, `/metrics`, and parts of `/v1/admin`."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, BeforeValidator, Field

from engine import ANSWERS, ModelHealth
from server.api.admin.schema import Past
from server.api.caller import TheActor
from server.api.schema import Asked, LimitsInForce, Listed, Shown, refused
from server.auth.access import KeyWith
from server.instance import Difference, Renewal
from server.observability.metrics import CONTENT_TYPE, read_page
from server.observability.status import Refusal, Status
from server.observability.status_server import degraded, read_status
from server.reload import take_over
from server.store.audit import read_entries
from server.store.schema import utc_now
from server.validation import iso, past

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(KeyWith("admin"))])
probes = APIRouter(tags=["health"])
# The reason of a failed model, but not the error's text: that is for the operator and may name files.
_SHOWN = ("status", "phase", "progress", "elapsed_seconds", "remaining_seconds", "restarts", "reason")


class AuditQuery(Asked):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    since: Past | None = None


class RequestsQuery(Asked):
    refused: Annotated[
        bool, BeforeValidator(refused("must be true: no others are kept", lambda value: value != "true"))
    ]
    since: Past = Field(default_factory=lambda: past("1h", utc_now()))
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class Tier(LimitsInForce):
    """A tier. Its keys may use `models`; limits are each key's."""

    id: str
    models: list[str]
    queue_share: float


class Entry(Shown):
    """One change: who made it, from where, what was done to what."""

    id: int
    at: Annotated[str, BeforeValidator(iso)]
    actor: str
    origin: str
    action: str
    object: str
    detail: dict[str, Any]


class Reloaded(BaseModel):
    """What is served after a reload of models.yaml and voices, and what that changed."""

    object: Literal["config"] = "config"
    models: list[str]
    tiers: list[str]
    added: list[str]
    changed: list[str]
    removed: list[str]
    voices: Difference
    warnings: list[str]
    """Why voices are hidden or cannot speak, whether that is new or not."""
    again: list[str]
    """Models that answer 503 until they are loaded again, after their last answer."""
    later: list[str]
    """Models that keep their memory until they are loaded again, though another amount is planned."""
    certificate: Renewal | None
    """null: this server speaks plain HTTP."""


@router.get("/audit")
async def read_audit(query: Annotated[AuditQuery, Query()], request: Request) -> Listed[Entry]:
    """List changes of keys and configuration, newest first."""
    entries = await read_entries(request.app.state.database, query.limit, query.since)
    return Listed(data=[Entry.model_validate(entry) for entry in entries])


@router.get("/requests")
async def read_requests(query: Annotated[RequestsQuery, Query()], request: Request) -> Listed[Refusal]:
    """List the last requests that were refused or failed, newest first: at most 1,000, since the server's start."""
    return Listed(data=request.app.state.lately.refused(query.since)[: query.limit])


@router.get("/status", response_model=Status)
async def status(request: Request) -> Response:
    """Show the state of models, memory, queues and GPUs; at most a second old.

    In a cluster `replicas` has the same of each, and `machines` all machines; the rest is of the one that answers.
    """
    peers = request.app.state.place.peers

    async def make() -> bytes:
        found = await read_status(request.app)
        if peers is not None:
            replicas, machines = await asyncio.gather(peers.statuses(), peers.machines())
            found = found.model_copy(update={"replicas": replicas, "machines": machines})
        return found.model_dump_json().encode()

    return Response(await request.app.state.status_page.read(make), media_type="application/json")


@router.get("/tiers")
async def list_tiers(request: Request) -> Listed[Tier]:
    """List the tiers of models.yaml: the models of their keys, and their limits."""
    config = request.app.state.engine.config
    return Listed(
        data=[
            Tier.model_validate(
                dict(tier) | {"models": [spec.id for spec in config.entries.values() if spec.tier in tier.models]}
            )
            for tier in config.tiers.values()
        ]
    )


@router.post("/reload")
async def reload(request: Request, by: TheActor) -> Reloaded:
    """Read models.yaml again, and the certificate. A wrong file changes nothing; the answer has its problems."""
    applied = await take_over(request.app, by)
    config = request.app.state.engine.config
    return Reloaded(
        models=list(config.entries),
        tiers=list(config.tiers),
        **asdict(applied.models),
        voices=applied.voices,
        warnings=list(applied.warnings),
        again=list(applied.again),
        later=list(applied.later),
        certificate=applied.certificate,
    )


@probes.head("/health/live", include_in_schema=False)
@probes.get("/health/live")
async def live() -> dict[str, str]:
    """Answer 200 as long as the process answers at all; never waits for an engine."""
    return {"status": "ok"}


@probes.head("/ping", include_in_schema=False)
@probes.get("/ping", include_in_schema=False)
@probes.head("/health", include_in_schema=False)
@probes.get("/health", include_in_schema=False)
@probes.head("/health/ready", include_in_schema=False)
@probes.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Answer 200 when every model answers and the server is not ending, else 503; with the state of each model.

    `degraded` says what does not work meanwhile, else it is null: with its database down a server still answers, and
    another one on the same database would not do better.

    A model that waits for its turn on shared memory counts as answering: a request loads it.
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
    body = {"status": status, "degraded": degraded(request.app), "models": shown}
    headers = {} if status == "ready" else {"Retry-After": "5"}
    return JSONResponse(body, 200 if status == "ready" else 503, headers)


@probes.get("/metrics", response_class=Response, include_in_schema=False, dependencies=[Depends(KeyWith("metrics"))])
async def read_metrics(request: Request) -> Response:
    """Give everything that is counted, in Prometheus' text format; at most a second old."""
    return Response(await read_page(request.app), headers={"content-type": CONTENT_TYPE})

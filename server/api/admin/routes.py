"""`/v1/admin/audit`, `/reload` and `/status`: who changed what, models.yaml read again, how all of it stands."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, BeforeValidator, Field

from server.api.admin.usage import Past
from server.api.caller import TheActor
from server.api.schema import Asked, Listed, Shown
from server.auth.access import KeyWith
from server.instance import Difference, Renewal
from server.observability.moments import iso
from server.observability.status import Status, read_status
from server.reload import renew_certificate, take_over
from server.store import AuditLog

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(KeyWith("admin"))])


class AuditQuery(Asked):
    """What to show of the audit log."""

    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    since: Past | None = None


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
    """What is served since models.yaml and the voices were read again."""

    object: Literal["config"] = "config"
    models: list[str]
    tiers: list[str]
    added: list[str]
    changed: list[str]
    removed: list[str]
    voices: Difference
    warnings: list[str]
    """Why voices are hidden or cannot speak, whether that is new or not."""
    later: list[str]
    """Models that keep the memory that they have, though another amount is planned, until they are loaded again."""
    certificate: Renewal | None
    """null: this server speaks plain HTTP."""


@router.get("/audit")
async def read_audit(query: Annotated[AuditQuery, Query()], request: Request) -> Listed[Entry]:
    """List changes of keys and configuration, the newest first."""
    entries = await AuditLog(request.app.state.database).read(query.limit, query.since)
    return Listed(data=[Entry.model_validate(entry) for entry in entries])


@router.get("/status")
async def status(request: Request) -> Status:
    """Say how models, memory, queues and GPUs stand at this moment."""
    return await read_status(request.app)


@router.post("/reload")
async def reload(request: Request, by: TheActor) -> Reloaded:
    """Read models.yaml again, and the certificate. A wrong file changes nothing, and its problems are the answer."""
    applied = await take_over(request.app, by)
    config = request.app.state.engine.config
    return Reloaded(
        models=list(config.models),
        tiers=list(config.tiers),
        **asdict(applied.models),
        voices=applied.voices,
        warnings=list(applied.warnings),
        later=list(applied.later),
        certificate=renew_certificate(request.app),
    )

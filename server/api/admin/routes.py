"""`/v1/admin/audit`, `/reload` and `/status`: who changed what, models.yaml read again, how all of it stands."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from server.api.admin.schema import ChangedVoices, Entry, EntryList, Reloaded, RenewedCertificate
from server.api.admin.usage import AuditQuery
from server.api.dependencies import TheActor, TheAudit
from server.auth.access import KeyWith
from server.observability.status import Status, read_status
from server.reload import renew_certificate, take_over

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(KeyWith("admin"))])


@router.get("/audit")
async def read_audit(query: Annotated[AuditQuery, Query()], audit: TheAudit) -> EntryList:
    """List changes of keys and configuration, the newest first."""
    return EntryList(data=[Entry.of(entry) for entry in await audit.read(query.limit, query.since)])


@router.get("/status")
async def status(request: Request) -> Status:
    """Say how models, memory, queues and GPUs stand at this moment."""
    return await read_status(request.app)


@router.post("/reload")
async def reload(request: Request, by: TheActor) -> Reloaded:
    """Read models.yaml again, and the certificate. A wrong file changes nothing, and its problems are the answer."""
    applied = await take_over(request.app, by)
    renewal = renew_certificate(request.app)
    return Reloaded(
        models=list(request.app.state.config.models),
        tiers=list(request.app.state.config.tiers),
        added=list(applied.models.added),
        changed=list(applied.models.changed),
        removed=list(applied.models.removed),
        voices=ChangedVoices(**asdict(applied.voices)),
        warnings=list(applied.warnings),
        later=list(applied.later),
        certificate=None if renewal is None else RenewedCertificate(**asdict(renewal)),
    )

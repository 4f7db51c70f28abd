"""`GET /v1/key`: what the caller's own key may do, and what is left of its limits."""

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator

from server.api.schema import Shown
from server.auth.metering import Meter
from server.observability.moments import iso
from server.store.keys import SCOPES, ApiKey

router = APIRouter(prefix="/v1", tags=["keys"])


class LimitsInForce(Shown):
    """The key's own limits where it has any, else its tier's. null: no limit; 0: nothing."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel_requests: int | None
    batch_items: int | None
    images_per_day: int | None


class Left(BaseModel):
    """What is left at this moment: of this minute, of today (UTC), or beside what runs. null: no limit."""

    requests: int | None
    tokens: int | None
    parallel_requests: int | None
    images: int | None


class OwnKey(Shown):
    """The key of this request. Its text is not known here."""

    object: Literal["key"] = "key"
    public_id: str
    name: str
    tier: str
    scopes: Annotated[list[str], BeforeValidator(lambda scopes: [scope for scope in SCOPES if scope in scopes])]
    models: list[str] | None
    """null: all of the tier."""
    created_at: Annotated[str | None, BeforeValidator(iso)]
    expires_at: Annotated[str | None, BeforeValidator(iso)]
    limits: LimitsInForce
    left: Left


@router.get("/key")
async def read_own_key(request: Request) -> OwnKey:
    """Show the caller's own key: its rights, the limits in force, and what is left of them."""
    return await own_key(request, request.state.key)


async def own_key(request: Request, key: ApiKey) -> OwnKey:
    meter: Meter = request.app.state.meter
    limits = key.limits_in(request.app.state.engine.config.tiers)
    left = await meter.of(key.public_id, limits).left()
    return OwnKey.model_validate(asdict(key) | {"limits": limits, "left": left})

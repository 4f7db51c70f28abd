"""`GET /v1/key`: what the caller's own key may do, and what is left of its limits."""

from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from server.api.schema import AnyKey, LimitsInForce
from server.auth.metering import Meter
from server.store.keys import ApiKey

router = APIRouter(prefix="/v1", tags=["keys"])


class Left(BaseModel):
    """What is left at this moment: of this minute, of today (UTC), or beside what runs. null: no limit."""

    requests: int | None
    tokens: int | None
    parallel_requests: int | None
    images: int | None


class OwnKey(AnyKey):
    """The key of this request. Its text is not known here."""

    object: Literal["key"] = "key"
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

"""`GET /v1/key` and `/v1/models`: the caller's key, what is left of its limits, and its models."""

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from server.api.caller import TheAccess
from server.api.schema import AnyKey, LimitsInForce, Listed, Model
from server.auth.access import KeyWith
from server.auth.metering import Meter
from server.store.keys import ApiKey

router = APIRouter(prefix="/v1")
_ModelsKey = Annotated[ApiKey, Depends(KeyWith("models"))]


@router.get("/models", tags=["models"])
async def list_models(key: _ModelsKey, access: TheAccess) -> Listed[Model]:
    """List the models that this key may use, in the order of models.yaml."""
    return Listed(data=[Model.model_validate(info) for info in access.models(key)])


@router.get("/models/{model:path}", tags=["models"])
async def retrieve_model(model: str, key: _ModelsKey, access: TheAccess) -> Model:
    """Show one model."""
    return Model.model_validate(access.model(key, model))


class Left(BaseModel):
    """What is left now of each limit: of this minute, of today (UTC), or beside running requests. null: no limit."""

    requests: int | None
    tokens: int | None
    parallel_requests: int | None
    images: int | None


class OwnKey(AnyKey):
    """The key of this request, without its secret."""

    object: Literal["key"] = "key"
    limits: LimitsInForce
    left: Left


@router.get("/key", tags=["keys"])
async def read_own_key(request: Request) -> OwnKey:
    """Show the caller's own key: its rights, the limits in force, and what is left of them."""
    return await own_key(request, request.state.key)


async def own_key(request: Request, key: ApiKey) -> OwnKey:
    meter: Meter = request.app.state.meter
    limits = key.limits_in(request.app.state.engine.config.tiers)
    left = await meter.of(key.public_id, limits).left()
    return OwnKey.model_validate(asdict(key) | {"limits": limits, "left": left})

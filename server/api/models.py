"""`GET /v1/models` and `GET /v1/models/{id}`."""

from typing import Annotated

from fastapi import APIRouter, Depends

from server.api.caller import TheAccess
from server.api.schema import Listed, Model
from server.auth.access import KeyWith
from server.store.keys import ApiKey

router = APIRouter(prefix="/v1", tags=["models"])
_Key = Annotated[ApiKey, Depends(KeyWith("models"))]


@router.get("/models")
async def list_models(key: _Key, access: TheAccess) -> Listed[Model]:
    """List the models that this key may use, in the order of models.yaml."""
    return Listed(data=[Model.model_validate(info) for info in access.models(key)])


@router.get("/models/{model:path}")
async def retrieve_model(model: str, key: _Key, access: TheAccess) -> Model:
    """Show one model."""
    return Model.model_validate(access.model(key, model))

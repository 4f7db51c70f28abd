"""`GET /v1/usage`: what keys have used. Everybody may read their own, and with the scope `admin` all."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from server.dependencies import TheMeter, any_key
from server.errors import ApiError
from server.schemas.usage import UsageList, UsageQuery, UsageSum, groups
from server.store import ApiKey

router = APIRouter(prefix="/v1", tags=["usage"])


@router.get("/usage")
async def read_usage(
    query: Annotated[UsageQuery, Query()], key: Annotated[ApiKey, Depends(any_key)], meter: TheMeter
) -> UsageList:
    """Sum up requests and tokens by hour, day, model, kind or key, up to this moment."""
    whose = query.key
    if "admin" not in key.scopes:
        if whose not in {None, key.public_id}:
            raise ApiError(
                403,
                "insufficient_permissions",
                "Only keys with the scope `admin` may read what others use. Leave out `key` for your own usage.",
                type="permission_error",
                param="key",
            )
        whose = key.public_id
    await meter.book.flush()  # what was used a moment ago belongs to it
    rows = await meter.book.read(query.since, query.until, key=whose, model=query.model, group_by=groups(query.by))
    return UsageList(data=[UsageSum.of(row) for row in rows])

"""`GET /v1/usage`: what keys have used. Each key may read its own, and with the scope `admin` all."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from server.api.admin.schema import UsageQuery, UsageSum, groups
from server.api.schema import Listed
from server.errors import ApiError
from server.store.keys import ApiKey
from server.store.usage import UsageBook

router = APIRouter(prefix="/v1", tags=["usage"])


@router.get("/usage")
async def read_usage(query: Annotated[UsageQuery, Query()], request: Request) -> Listed[UsageSum]:
    """Sum up requests and tokens by hour, day, model, kind or key; in the order of time, key, model and kind."""
    key: ApiKey = request.state.key
    book: UsageBook = request.app.state.meter.book
    owner = query.key
    if "admin" not in key.scopes:
        if owner not in {None, key.public_id}:
            sentence = "Only keys with the scope `admin` may read the usage of others. Leave `key` out for your own."
            raise ApiError(403, "insufficient_permissions", sentence, param="key")
        owner = key.public_id
    await book.flush()  # what was used a moment ago belongs to it
    rows = await book.read(query.since, query.until, key=owner, model=query.model, group_by=groups(query.by))
    return Listed(data=[UsageSum.of(row) for row in rows])

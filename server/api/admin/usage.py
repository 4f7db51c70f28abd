"""`GET /v1/usage`: what keys have used. Each key may read its own, and with the scope `admin` all."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from server.api.schema import Asked, Listed
from server.errors import ApiError
from server.observability.moments import iso, past
from server.store.keys import ApiKey
from server.store.schema import utc_now
from server.store.usage import GroupBy, UsageBook, UsageRow
from server.validation import FieldError

router = APIRouter(prefix="/v1", tags=["usage"])
_GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)


def _since(text: Any) -> datetime:
    return text if isinstance(text, datetime) else past(str(text), utc_now())  # FastAPI passes defaults through here


def groups(text: str) -> tuple[GroupBy, ...]:
    """Read `day` or `day,model`. Raises ValueError, its text following the name of the field."""
    found = tuple(group for group in _GROUPS if group in text.split(","))
    if len(found) != len(text.split(",")):
        raise ValueError(f"must be one of {', '.join(_GROUPS)}, or several with commas between")
    return found


Past = Annotated[
    datetime,
    BeforeValidator(_since),
    WithJsonSchema({"type": "string", "examples": ["7d", "2026-11-21", "2026-11-21T12:00:00Z"]}),
]


class UsageQuery(Asked):
    """What to sum up, and how. Times are whole hours in UTC."""

    since: Past = Field(default_factory=lambda: _since("7d"))
    """So long ago (`7d`), a day or a moment."""
    until: Past = Field(default_factory=utc_now)
    """Up to the hour of this moment."""
    by: Annotated[str, AfterValidator(lambda by: groups(by) and by)] = "day"
    """`hour`, `day`, `model`, `kind` or `key`, or several with commas between."""
    model: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,256}$")] | None = None
    key: Annotated[str, Field(pattern=r"^[0-9A-Za-z]{12}$")] | None = None
    """Public id of one key. Of another's only with the scope `admin`."""

    @model_validator(mode="after")
    def _span_is_possible(self) -> UsageQuery:
        if self.until <= self.since:
            raise FieldError("until", "must be later than `since`")
        days, by_hour = (31, " when by hour") if "hour" in self.by else (366, "")
        if self.until - self.since > timedelta(days=days):
            raise FieldError("since", f"must be at most {days} days before `until`{by_hour}")
        return self


class UsageSum(BaseModel):
    """A sum. What was not asked for in `by` is null."""

    start: str | None
    key: str | None
    model: str | None
    kind: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    images: int
    audio_seconds: float
    errors: int
    aborted: int

    @classmethod
    def of(cls, row: UsageRow) -> UsageSum:
        return cls(start=iso(row.start), key=row.key, model=row.model, kind=row.kind, **asdict(row.usage))


@router.get("/usage")
async def read_usage(query: Annotated[UsageQuery, Query()], request: Request) -> Listed[UsageSum]:
    """Sum up requests and tokens by hour, day, model, kind or key; in the order of time, key, model and kind."""
    key: ApiKey = request.state.key
    book: UsageBook = request.app.state.meter.book
    owner = query.key
    if "admin" not in key.scopes:
        if owner not in {None, key.public_id}:
            sentence = "Only keys with the scope `admin` may read what others use. Leave out `key` for your own usage."
            raise ApiError(403, "insufficient_permissions", sentence, param="key")
        owner = key.public_id
    await book.flush()  # what was used a moment ago belongs to it
    rows = await book.read(query.since, query.until, key=owner, model=query.model, group_by=groups(query.by))
    return Listed(data=[UsageSum.of(row) for row in rows])

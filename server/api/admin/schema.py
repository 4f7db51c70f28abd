"""The bodies, queries and answers about keys and usage, and the rights that a key may be given.

The command line shows and checks the same, without a web framework.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from server.api.schema import AnyKey, Asked, Iso
from server.store import KeyFieldError
from server.store.keys import DEFAULT_SCOPES, ApiKey, check_known
from server.store.schema import utc_now
from server.store.usage import GroupBy, UsageRow
from server.validation import FieldError, iso, moment, past, spelled

if TYPE_CHECKING:
    from engine.config import Config

_GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)
Moment = Annotated[
    datetime,
    BeforeValidator(lambda value: moment(value if isinstance(value, str) else "")),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Limit = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    """Strict types, and no field that is not known."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, from_attributes=True, use_attribute_docstrings=True
    )


class Limits(Body):
    """Limits of one key where they are not its tier's. null: as the tier; 0: nothing."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    parallel_requests: Limit | None = None
    batch_items: Limit | None = None
    images_per_day: Limit | None = None


class NewKeyBody(Body):
    name: str
    """Whose key, or what for: 1 to 64 printable characters."""
    tier: str
    """A tier of models.yaml."""
    scopes: list[str] = list(DEFAULT_SCOPES)
    """What it may do. All but `metrics` and `admin` if left out."""
    models: list[str] | None = None
    """Only these models. null: all of the tier."""
    expires_at: Moment | None = None
    notes: str = ""
    limits: Limits = Limits()


class ChangesBody(Body):
    """The body of `PATCH /v1/admin/keys/{id}`. What is left out stays as it is."""

    name: str = ""
    tier: str = ""
    scopes: list[str] = []
    models: list[str] | None = None
    notes: str = ""
    limits: Limits = Limits()
    """Of these, too, what is left out stays; null goes back to the tier's."""


class RotateBody(Body):
    overlap_seconds: Annotated[int, Field(ge=0, le=366 * 86400)] = 86400
    """How long the old key still works."""
    expires_at: Moment | None = None
    """When the new key ends. null: it lives as long as the old one was made for."""


class ExpireBody(Body):
    expires_at: Moment | None
    """When the key ends; null: never."""


class Key(AnyKey):
    """A key as it may be shown: everything but its text."""

    revoked_at: Iso
    last_used_at: Iso
    notes: str
    replaced_by: str | None
    limits: Limits


class NewKey(Key):
    """A key that was just made. `key` is its text, in this answer and never again."""

    key: str

    @classmethod
    def made(cls, text: str, key: ApiKey) -> Self:
        return cls.model_validate({"key": text, **asdict(key)})


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
    model: Annotated[str, spelled(r"^[\x20-\x7e]{1,256}$", "must be the id of a model")] | None = None
    key: Annotated[str, spelled(r"^[0-9A-Za-z]{12}$", "must be a public id: 12 letters and digits")] | None = None
    """Public id of one key. Of another's only with the scope `admin`."""

    @model_validator(mode="after")
    def _span_is_possible(self) -> Self:
        if self.until <= self.since:
            raise FieldError("until", "must be later than `since`")
        days, by_hour = (31, " when by hour") if "hour" in self.by else (366, "")
        if self.until - self.since > timedelta(days=days, hours=1):  # both are parts of hours
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
    def of(cls, row: UsageRow) -> Self:
        return cls(start=iso(row.start), key=row.key, model=row.model, kind=row.kind, **asdict(row.usage))


def working_admins(keys: Iterable[ApiKey], now: datetime) -> list[str]:
    """Return the ids of the keys that work and have the scope `admin`."""
    return [key.public_id for key in keys if "admin" in key.scopes and key.usable_at(now)]


def check_rights(config: "Config", tier: str, models: Iterable[str], *, had: Collection[str] = ()) -> None:
    """Raise `KeyFieldError` unless the tier is configured and may use each of the models.

    A model that the key `had` may be gone from models.yaml.
    """
    check_known("tier", "tier", tier, config.tiers)
    for model in models:
        entry = config.entry(model)
        if entry is None:
            check_known("model", "models", model, {*config.entries, *had})
            continue
        needed = entry.tier
        if needed not in config.tiers[tier].models:
            message = f"Keys of tier {tier!r} may not use the model {model!r}: it is for tier {needed!r}."
            raise KeyFieldError("models", message)

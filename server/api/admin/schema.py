"""Bodies and answers of `/v1/admin`. A field that is not known is refused: a limit with a typo would be none."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from server.observability.moments import MomentError, iso, moment
from server.store import DEFAULT_SCOPES, SCOPES, ApiKey, AuditEntry


def _moment(value: Any) -> datetime:
    if isinstance(value, str):
        return moment(value)
    raise MomentError("must be a date and time with its zone, like 2027-01-31T12:00:00Z")


Moment = Annotated[
    datetime,
    BeforeValidator(_moment),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Limit = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    """Strict types, and no field that is not known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class Limits(Body):
    """Limits of one key where they are not its tier's. null: as the tier; 0: nothing."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    parallel_requests: Limit | None = None
    batch_items: Limit | None = None
    images_per_day: Limit | None = None


class NewKeyBody(Body):
    """The body of `POST /v1/admin/keys`."""

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

    def changes(self) -> dict[str, Any]:
        """Return what was sent, flat."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "limits"}
        return given | {name: getattr(self.limits, name) for name in self.limits.model_fields_set}


class RotateBody(Body):
    """The body of `POST /v1/admin/keys/{id}/rotate`."""

    overlap_seconds: Annotated[int, Field(ge=0, le=366 * 86400)] = 86400
    """How long the old key still works."""
    expires_at: Moment | None = None
    """When the new key ends. null: it lives as long as the old one was made for."""


class ExpireBody(Body):
    """The body of `POST /v1/admin/keys/{id}/expire`."""

    expires_at: Moment | None
    """When the key ends; null: never."""


class Key(BaseModel):
    """A key as it may be shown: everything but its text."""

    public_id: str
    name: str
    tier: str
    scopes: list[str]
    models: list[str] | None
    created_at: str | None
    expires_at: str | None
    revoked_at: str | None
    last_used_at: str | None
    notes: str
    replaced_by: str | None
    limits: Limits

    @classmethod
    def of(cls, key: ApiKey) -> Key:
        """Show what the store knows."""
        return cls(
            public_id=key.public_id,
            name=key.name,
            tier=key.tier,
            scopes=[scope for scope in SCOPES if scope in key.scopes],
            models=None if key.models is None else list(key.models),
            created_at=iso(key.created_at),
            expires_at=iso(key.expires_at),
            revoked_at=iso(key.revoked_at),
            last_used_at=iso(key.last_used_at),
            notes=key.notes,
            replaced_by=key.replaced_by,
            limits=Limits(**asdict(key.limits)),
        )


class NewKey(Key):
    """A key that was just made. `key` is its text, in this answer and never again."""

    key: str

    @classmethod
    def made(cls, text: str, key: ApiKey) -> NewKey:
        """Show a new key to whoever asked for it."""
        return cls(key=text, **dict(Key.of(key)))


class KeyList(BaseModel):
    """All keys, oldest first."""

    object: Literal["list"] = "list"
    data: list[Key]


class Entry(BaseModel):
    """One change: who made it, from where, what was done to what."""

    id: int
    at: str
    actor: str
    origin: str
    action: str
    object: str
    detail: dict[str, Any]

    @classmethod
    def of(cls, entry: AuditEntry) -> Entry:
        """Show what the store knows."""
        return cls(**asdict(entry) | {"at": iso(entry.at)})


class EntryList(BaseModel):
    """Changes, the newest first."""

    object: Literal["list"] = "list"
    data: list[Entry]


class ChangedVoices(BaseModel):
    """Ids of voices."""

    added: list[str]
    changed: list[str]
    removed: list[str]


class RenewedCertificate(BaseModel):
    """What became of the TLS certificate."""

    renewed: bool
    """Connections that begin from now on are shown another one than before."""
    refused: str | None
    """Why it stays as it was: the files that are there now cannot be used. For the operator, with their names."""


class Reloaded(BaseModel):
    """What is served since models.yaml and the voices were read again."""

    object: Literal["config"] = "config"
    models: list[str]
    tiers: list[str]
    added: list[str]
    changed: list[str]
    removed: list[str]
    voices: ChangedVoices
    warnings: list[str]
    """Why voices are hidden or cannot speak, whether that is new or not."""
    later: list[str]
    """Models that keep the memory that they have, though another amount is planned, until they are loaded again."""
    certificate: RenewedCertificate | None
    """null: this server speaks plain HTTP."""

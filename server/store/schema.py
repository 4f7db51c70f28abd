"""The tables as SQLAlchemy Core sees them; `migrations/` makes them in the database.

Only types that SQLite and PostgreSQL both know.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import JSON, Column, DateTime, LargeBinary, MetaData, String, Table
from sqlalchemy.types import TypeDecorator

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime; SQLite drops the zone on the way in, so it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse a naive datetime (ValueError): whose midnight it means cannot be known."""
        del dialect
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime for the store must carry its time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = MetaData()

api_key = Table(
    "api_key",
    metadata,
    Column("public_id", String(12), primary_key=True),
    Column("secret_sha256", LargeBinary(32), nullable=False),  # of the whole key text
    Column("name", String(64), nullable=False),
    Column("tier", String(64), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("models", JSON(none_as_null=True)),  # NULL: every model of the tier
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
    Column("last_used_at", UtcDateTime),
)

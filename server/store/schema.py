"""The tables, as a new database has them; migrations.py changes those of an older release.

Only types that SQLite and PostgreSQL both know.
"""

from datetime import UTC, datetime
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

utc_now = partial(datetime.now, UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime; SQLite drops the zone on the way in, so it is put back on the way out."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _: Dialect) -> datetime | None:
        """Refuse a naive datetime (ValueError): whose midnight it means cannot be known."""
        if value is not None and value.tzinfo is None:
            raise ValueError("a datetime for the store must carry its time zone")
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, _: Dialect) -> datetime | None:
        return value and (value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC))


metadata = sa.MetaData()

api_key = sa.Table(
    "api_key",
    metadata,
    sa.Column("public_id", sa.String(12), primary_key=True),
    sa.Column("secret_sha256", sa.LargeBinary(32), nullable=False),  # of the whole key text
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("tier", sa.String(64), nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("models", sa.JSON(none_as_null=True)),  # NULL: every model of the tier
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("revoked_at", UtcDateTime),
    sa.Column("last_used_at", UtcDateTime),
    sa.Column("notes", sa.String(1000), nullable=False, server_default=""),
    sa.Column("replaced_by", sa.String(12)),
    # Limits of this key alone; NULL: its tier's
    sa.Column("requests_per_minute", sa.Integer),
    sa.Column("tokens_per_minute", sa.Integer),
    sa.Column("parallel_requests", sa.Integer),
    sa.Column("batch_items", sa.Integer),
    sa.Column("images_per_day", sa.Integer),
)

bucket = sa.Table(
    "bucket",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("tat", sa.BigInteger, nullable=False),  # nanoseconds since 1970: when the bucket is full again
)

quota_day = sa.Table(
    "quota_day",
    metadata,
    sa.Column("owner", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),  # in UTC
    sa.Column("used", sa.BigInteger, nullable=False),
)

COUNTERS = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "images", "errors", "aborted")

usage_hour = sa.Table(
    "usage_hour",
    metadata,
    sa.Column("key_id", sa.String(12), primary_key=True),
    sa.Column("model", sa.String, primary_key=True),
    sa.Column("hour", sa.Integer, primary_key=True, autoincrement=False),  # hours since 1970 UTC: // 24 is the day
    sa.Column("kind", sa.String(32), primary_key=True),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTERS),
    sa.Column("audio_seconds", sa.Double, nullable=False),
    sa.Index("usage_hour_by_hour", "hour"),
)

audit = sa.Table(
    "audit",
    metadata,
    # SQLite numbers rows by itself only in a column of exactly the type INTEGER
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("actor", sa.String, nullable=False),
    sa.Column("origin", sa.String, nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("object", sa.String, nullable=False),
    sa.Column("detail", sa.JSON, nullable=False),
    sa.Index("audit_by_at", "at"),
)


console_session = sa.Table(
    "console_session",
    metadata,
    sa.Column("id_sha256", sa.LargeBinary(32), primary_key=True),  # of the half in the cookie
    sa.Column("token_sha256", sa.LargeBinary(32), nullable=False),  # of the half in the page
    sa.Column("key_id", sa.String(12), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("last_seen", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Index("console_session_by_key", "key_id"),
)

# Servers of one PostgreSQL: what each runs; a row counts as long as it is renewed.
replica = sa.Table(
    "replica",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("renewed_at", sa.Double, nullable=False),  # seconds since 1970, by the database's clock
    sa.Column("running", sa.JSON, nullable=False),  # requests by key
)

secret = sa.Table(
    "secret",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.LargeBinary(32), nullable=False),
)

# Moments of files and batches are whole seconds since 1970, as their convention has them. Ids are in order of time.
file = sa.Table(
    "file",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(12), nullable=False),
    sa.Column("place", sa.String(64), nullable=False),  # the folder that has it
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("filename", sa.String(255), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Index("file_by_key", "key_id", "id"),
)

BATCH_MOMENTS = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)
BATCH_COUNTS = ("total", "completed", "failed")

batch = sa.Table(
    "batch",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(12), nullable=False),
    sa.Column("place", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(8), nullable=False),
    sa.Column("labels", sa.JSON(none_as_null=True)),  # its `metadata`
    sa.Column("output_seconds", sa.BigInteger),  # how long its output is kept; NULL: as the server keeps files
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    *(sa.Column(name, sa.BigInteger) for name in BATCH_MOMENTS),
    *(sa.Column(name, sa.Integer, nullable=False, server_default="0") for name in BATCH_COUNTS),
    sa.Column("model", sa.String),
    sa.Column("usage", sa.JSON(none_as_null=True)),
    sa.Column("errors", sa.JSON(none_as_null=True)),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    # Which process runs it, and until when in Unix seconds, unless that is renewed
    sa.Column("runner", sa.String(32)),
    sa.Column("leased_until", sa.Double, nullable=False, server_default="0"),
    sa.Index("batch_by_key", "key_id", "id"),
    sa.Index("batch_by_status", "status"),
)

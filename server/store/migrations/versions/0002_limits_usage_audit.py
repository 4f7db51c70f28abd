"""Limits, notes and successors of keys; buckets, quotas, usage and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

LIMITS = ("requests_per_minute", "tokens_per_minute", "parallel_requests", "batch_items", "images_per_day")
COUNTERS = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "images", "errors", "aborted")


def upgrade() -> None:
    with op.batch_alter_table("api_key") as table:
        table.add_column(sa.Column("notes", sa.String(1000), nullable=False, server_default=""))
        table.add_column(sa.Column("replaced_by", sa.String(12)))
        for name in LIMITS:
            table.add_column(sa.Column(name, sa.Integer))
    op.create_table(
        "bucket",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("tat", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "quota_day",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("day", sa.Date, primary_key=True),
        sa.Column("used", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "usage_hour",
        sa.Column("key_id", sa.String(12), primary_key=True),
        sa.Column("model", sa.String, primary_key=True),
        sa.Column("hour", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(32), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTERS),
        sa.Column("audio_seconds", sa.Double, nullable=False),
    )
    op.create_index("usage_hour_by_hour", "usage_hour", ["hour"])
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("object", sa.String, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
    )
    op.create_index("audit_by_at", "audit", ["at"])

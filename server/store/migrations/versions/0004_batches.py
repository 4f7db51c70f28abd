"""Files, and batches of what stands in them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

MOMENTS = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)
COUNTS = ("total", "completed", "failed")


def upgrade() -> None:
    op.create_table(
        "file",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("place", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
    op.create_index("file_by_key", "file", ["key_id", "id"])
    op.create_table(
        "batch",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("place", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(8), nullable=False),
        sa.Column("labels", sa.JSON(none_as_null=True)),
        sa.Column("output_seconds", sa.BigInteger),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in MOMENTS),
        *(sa.Column(name, sa.Integer, nullable=False, server_default="0") for name in COUNTS),
        sa.Column("model", sa.String),
        sa.Column("usage", sa.JSON(none_as_null=True)),
        sa.Column("errors", sa.JSON(none_as_null=True)),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("runner", sa.String(32)),
        sa.Column("leased_until", sa.Double, nullable=False, server_default="0"),
    )
    op.create_index("batch_by_key", "batch", ["key_id", "id"])
    op.create_index("batch_by_status", "batch", ["status"])

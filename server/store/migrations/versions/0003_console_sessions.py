"""Sessions of the page."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "console_session",
        sa.Column("id_sha256", sa.LargeBinary(32), primary_key=True),
        sa.Column("token_sha256", sa.LargeBinary(32), nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("console_session_by_key", "console_session", ["key_id"])

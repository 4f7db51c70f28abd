"""Servers of one database: what each runs, and the keys that they share."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replica",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("renewed_at", sa.Double, nullable=False),
        sa.Column("running", sa.JSON, nullable=False),
    )
    op.create_table(
        "secret",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("value", sa.LargeBinary(32), nullable=False),
    )

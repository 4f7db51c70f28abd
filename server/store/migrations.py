"""The database's schema: the changes that made it, one function each, and how a database gets to the newest.

The way back is a backup. SQLAlchemy and Alembic are imported only when there is something to do. Versions are numbers
padded to four digits, so that a database from a newer release can be told from a foreign one. A new migration is a
function at the end of `MIGRATIONS`. A released one is never edited, and uses nothing of schema.py, which changes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from server.store import StoreError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from alembic.operations import Operations

VERSION_TABLE = "hearth_schema"  # not alembic's default: another program's database must not look like ours
_ADVISORY_LOCK = 7310577104  # any number that other programs on the same database are unlikely to use


def is_known(version: str) -> bool:
    """Whether a database of this version can be brought to HEAD; one from a newer release cannot."""
    return version.isdecimal() and int(version) <= int(HEAD)


def known_version(shown: str, tables: Collection[str], version: str | None) -> str | None:
    """The version of the schema in a database with these tables; None: it is empty, or its first start was cut off.

    Raises StoreError, where `shown` names the database, for one that is another program's or a newer release's.
    """
    if tables and VERSION_TABLE not in tables:
        raise StoreError(
            f"{shown} is a database of another program: it has tables, but none named {VERSION_TABLE}. Hearth has not "
            "changed it. Give Hearth a database of its own, or another data directory."
        )
    if version is not None and not is_known(version):
        raise StoreError(
            f"The key database {shown} has schema {version[:32]!r}; this release of Hearth knows schemas up to {HEAD}. "
            "A newer release has used it. Run that release again, or restore the backup made before the upgrade (see "
            "docs/keys.md). Hearth has not changed the database."
        )
    return version


def upgrade(connection: sa.Connection, to: str | None = None) -> None:
    """Bring the schema to HEAD, or `to` a version before, inside the caller's transaction.

    Does nothing where it is there already.
    """
    import sqlalchemy as sa
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    if connection.dialect.name == "postgresql":
        # SQLite's transaction keeps other processes out; on PostgreSQL two may come at once: the second finds it done
        connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
    kept = sa.Table(VERSION_TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
    kept.create(connection, checkfirst=True)
    done = int(connection.scalar(sa.select(kept.c.version_num)) or 0)
    op = Operations(MigrationContext.configure(connection))
    for migrate in MIGRATIONS[done : int(to or HEAD)]:
        migrate(op)
        done += 1
    connection.execute(kept.delete())
    connection.execute(kept.insert().values(version_num=f"{done:04}"))


def _keys(op: Operations) -> None:
    """API keys."""
    import sqlalchemy as sa

    op.create_table(
        "api_key",
        sa.Column("public_id", sa.String(12), primary_key=True),
        sa.Column("secret_sha256", sa.LargeBinary(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("models", sa.JSON(none_as_null=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("last_used_at", sa.DateTime(timezone=True)),
    )


def _limits_usage_audit(op: Operations) -> None:
    """Limits, notes and successors of keys; buckets, quotas, usage and the audit log."""
    import sqlalchemy as sa

    limits = ("requests_per_minute", "tokens_per_minute", "parallel_requests", "batch_items", "images_per_day")
    counters = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "images", "errors", "aborted")
    with op.batch_alter_table("api_key") as table:
        table.add_column(sa.Column("notes", sa.String(1000), nullable=False, server_default=""))
        table.add_column(sa.Column("replaced_by", sa.String(12)))
        for name in limits:
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
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in counters),
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


def _console_sessions(op: Operations) -> None:
    """Sessions of the page."""
    import sqlalchemy as sa

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


def _batches(op: Operations) -> None:
    """Files, and batches of their lines."""
    import sqlalchemy as sa

    moments = (
        *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
        *("cancelling_at", "cancelled_at"),
    )
    counts = ("total", "completed", "failed")
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
        *(sa.Column(name, sa.BigInteger) for name in moments),
        *(sa.Column(name, sa.Integer, nullable=False, server_default="0") for name in counts),
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


def _replicas(op: Operations) -> None:
    """Servers of one database: what each runs, and the secrets that they share."""
    import sqlalchemy as sa

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


MIGRATIONS = (_keys, _limits_usage_audit, _console_sessions, _batches, _replicas)
HEAD = f"{len(MIGRATIONS):04}"

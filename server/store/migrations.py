"""The database's schema: made by schema.py where there is none, and how an older one gets to the newest.

The way back is a backup. SQLAlchemy and Alembic are imported only when there is something to do. Versions are numbers
padded to four digits, so that a database from a newer release can be told from a foreign one. A change of schema.py
needs a function at the end of `MIGRATIONS`, which makes the same change. One that was released is never edited, and
takes nothing from schema.py, which moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from server.store import StoreError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from alembic.operations import Operations

VERSION_TABLE = "hearth_schema"  # not alembic's default: another program's database must not look like ours
MIGRATIONS: Sequence[Callable[[Operations], None]] = ()
_FIRST = 5  # the schema of 1.0.0
HEAD = f"{_FIRST + len(MIGRATIONS):04}"
_ADVISORY_LOCK = 7310577104  # any number that other programs on the same database are unlikely to use


def is_known(version: str) -> bool:
    """Whether a database of this version can be brought to HEAD; one from a newer release cannot."""
    return version.isdecimal() and _FIRST <= int(version) <= int(HEAD)


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


def upgrade(connection: sa.Connection, migrations: Sequence[Callable[[Operations], None]] = MIGRATIONS) -> None:
    """Make the tables, or bring those of an older release to the newest schema, inside the caller's transaction.

    Does nothing where that is done already.
    """
    import sqlalchemy as sa

    if connection.dialect.name == "postgresql":
        # SQLite's transaction keeps other processes out; on PostgreSQL two may come at once: the second finds it done
        connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
    kept = sa.Table(VERSION_TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))
    kept.create(connection, checkfirst=True)
    found = connection.scalar(sa.select(kept.c.version_num))
    if found is None:
        from server.store.schema import metadata

        metadata.create_all(connection, checkfirst=False)
    elif missing := migrations[int(found) - _FIRST :]:
        from alembic.migration import MigrationContext
        from alembic.operations import Operations

        op = Operations(MigrationContext.configure(connection))
        for migrate in missing:
            migrate(op)
    connection.execute(kept.delete())
    connection.execute(kept.insert().values(version_num=f"{_FIRST + len(migrations):04}"))

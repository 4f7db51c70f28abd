"""The schema's version: which one this release wants, and how a database gets there. The way back is a backup.

Alembic is imported only when there is something to do. Versions are numbers padded to four digits, so that a database
from a newer release can be told from a foreign one. A new one: a file like those in `versions/`, and raise HEAD.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from server.store import StoreError

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

HEAD = "0005"
VERSION_TABLE = "hearth_schema"  # not alembic's default: another program's database must not look like ours
_ADVISORY_LOCK = 7310577104  # any number that no other program on the same database is likely to take


def config(connection: Connection) -> Config:
    """Alembic's configuration for work on `connection`, without an ini file."""
    from alembic.config import Config

    if connection.dialect.name == "postgresql":
        # SQLite's transaction keeps other processes out; here two may come at once, and the second finds it done
        connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
    settings = Config(attributes={"connection": connection})
    # Config parses with interpolation: a percent sign in the installation path would be a reference
    settings.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return settings


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


def upgrade(connection: Connection) -> None:
    """Bring the schema to HEAD inside the caller's transaction; does nothing where it is there already."""
    from alembic import command

    command.upgrade(config(connection), HEAD)

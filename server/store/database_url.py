"""Reads a database URL without ever repeating what may be its password.

What is behind the address is for `sqlite_connections.py` and `postgresql_connections.py` to find out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import URL, exc, make_url

from server.store.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

SQLITE = "sqlite+aiosqlite"
POSTGRESQL = "postgresql+psycopg"
FILE_NAME = "hearth.db"
_FORMS = f"{SQLITE}:////var/lib/hearth/hearth.db or {POSTGRESQL}://user:password@host/database"


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file; of `hearth.db` in it when `path` is a directory."""
    file = path / FILE_NAME if path.is_dir() else path
    return URL.create(SQLITE, database=str(file.absolute())).render_as_string(hide_password=False)


def parse_url(text: str) -> URL:
    """A URL of one of the two kinds, complete. Raises StoreError, which repeats neither password nor text."""
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):
        # Without the cause: the text of a port that is no number may be half a password
        raise StoreError(f"The database URL cannot be read. Write it like {_FORMS}{_ESCAPE}") from None
    if url.drivername == SQLITE:
        _check_file(url)
    elif url.drivername == POSTGRESQL:
        _check_server(url)
    else:
        raise StoreError(f"Databases of kind {url.drivername[:32]!r} are not supported. Use {_FORMS}")
    return url


_ESCAPE = ". In a password, write @ as %40, : as %3A, / as %2F and % as %25."


def _check_file(url: URL) -> None:
    if not url.database or url.database == ":memory:" or url.query:
        raise StoreError(
            f"The database must be one file, without options: {SQLITE}:////path/to/hearth.db. "
            "A database in memory would forget every key."
        )


def _check_server(url: URL) -> None:
    # Behind an unescaped @ the rest of a password would be taken for the host, and be shown as such
    if "@" in (url.host or "") + (url.database or ""):
        raise StoreError(
            f"The database URL has more than one @. Write it like {POSTGRESQL}://user:password@host/db{_ESCAPE}"
        )
    if not url.database:
        raise StoreError(
            f"The database URL names no database. Write it like {POSTGRESQL}://user:password@host/database"
        )

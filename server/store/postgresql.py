"""A database on a PostgreSQL server: judging it before use, its connections, and what its errors mean.

Imported only when a URL asks for it, because the driver is an optional part of the installation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors
from sqlalchemy import URL, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from server.store.errors import StoreError
from server.store.migrations import HEAD, VERSION_TABLE, is_known

_POOL = 5
_STATEMENT_TIMEOUT_SECONDS = 30
_RECYCLE_SECONDS = 1800  # before a firewall forgets an idle connection


class PostgresqlConnections:
    """Connections to one database; what `database.Database` has too is described there."""

    kind = "postgresql"
    driver_errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, url: URL, busy_timeout_seconds: float) -> None:
        self._url = url
        self._busy_timeout_seconds = busy_timeout_seconds
        self._engine = self._made_engine()
        self._reader = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    async def prepare(self) -> str | None:
        """Judge the database, return its schema version (None: it is empty). Raises StoreError."""
        try:
            async with self._engine.connect() as connection:
                return await self._judge(connection)
        except (exc.DBAPIError, OSError) as error:
            reason = " ".join(str(getattr(error, "orig", None) or error).split())
            raise StoreError(
                f"The key database {self._shown} cannot be used (PostgreSQL: {self._without_password(reason)}). Check "
                "that the server runs, that host, port, user, password and database in the URL are right, and that "
                "pg_hba.conf lets this machine in."
            ) from error

    def check(self) -> None:
        """Nothing to do: a database that was dropped or moved answers with an error."""

    def blocking_connection(self) -> Any:
        _, arguments = self._engine.dialect.create_connect_args(self._url)
        # Prepared from the first call on: the statements of the buckets are few and always the same
        connection = psycopg.connect(**{**arguments, **self._arguments()}, autocommit=True, prepare_threshold=1)
        connection.execute("SET synchronous_commit = off")
        return connection

    def reading(self) -> AsyncConnection:
        return self._reader.connect()

    @asynccontextmanager
    async def writing(self, *, durable: bool) -> AsyncIterator[AsyncConnection]:
        async with self._engine.begin() as connection:
            if not durable:
                await connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
            yield connection

    def error_message(self, error: BaseException) -> str:
        """Return what a caller is told about an error of the driver."""
        if isinstance(error, (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected)):
            return "The key database is busy. Try again in a few seconds."
        return (
            "The key database does not answer. Try again in a few seconds; if it stays so, check that the "
            "PostgreSQL server runs and can be reached."
        )

    def permission_error(self, error: BaseException) -> StoreError | None:
        """Return the error for an upgrade that was not permitted; None: it failed for another reason."""
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreError(
                f"The user of {self._shown} may not create tables there. As PostgreSQL's administrator, run: "
                f'ALTER DATABASE "{self._url.database}" OWNER TO "{self._url.username}"'
            )
        return None

    async def backup(self, path: Path) -> None:
        del path
        raise StoreError(
            f"A PostgreSQL database is backed up with PostgreSQL's own tool: pg_dump --format=custom --file=FILE "
            f"{self._url.database}"
        )

    async def close(self) -> None:
        await self._engine.dispose()

    async def _judge(self, connection: AsyncConnection) -> str | None:
        async def ask(query: str) -> Any:
            return (await connection.exec_driver_sql(query)).scalar()

        if (encoding := await ask("SHOW server_encoding")) != "UTF8":
            raise StoreError(
                f"The key database {self._shown} stores text as {encoding}. Make it anew: CREATE DATABASE "
                f"\"{self._url.database}\" ENCODING 'UTF8' TEMPLATE template0"
            )
        if await ask("SHOW transaction_read_only") == "on":
            raise StoreError(f"The key database {self._shown} is read-only, as a standby is. Name the primary server.")
        tables = set((await connection.exec_driver_sql(_TABLES)).scalars())
        if not tables:
            return None
        if VERSION_TABLE not in tables:
            raise StoreError(
                f"{self._shown} is a database of another program: it has tables, but none named "
                f"{VERSION_TABLE}. Hearth has not changed it. Give Hearth a database of its own."
            )
        version: str | None = await ask(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - our constant
        if version is not None and not is_known(version):
            raise StoreError(
                f"The key database {self._shown} has schema {version[:32]!r}; this release of Hearth knows schemas up "
                f"to {HEAD}. A newer release has used it. Run that release again, or restore the backup "
                "made before the upgrade. Hearth has not changed the database."
            )
        return version

    def _made_engine(self) -> AsyncEngine:
        return create_async_engine(
            self._url,
            connect_args=self._arguments(),
            hide_parameters=True,  # errors must not carry hashes
            pool_size=_POOL,
            max_overflow=0,
            pool_timeout=self._busy_timeout_seconds,
            pool_pre_ping=True,  # the server may have been restarted since
            pool_recycle=_RECYCLE_SECONDS,
        )

    def _arguments(self) -> dict[str, Any]:
        given = self._url.query.get("options", "")
        settings = {
            "lock_timeout": f"{max(1, round(self._busy_timeout_seconds * 1000))}",
            "statement_timeout": f"{_STATEMENT_TIMEOUT_SECONDS}s",
            "idle_in_transaction_session_timeout": f"{_STATEMENT_TIMEOUT_SECONDS}s",
            "synchronous_commit": "on",
        }
        return {
            "application_name": "hearth",
            "client_encoding": "utf8",
            "connect_timeout": max(2, round(self._busy_timeout_seconds)),
            # A server that vanished without a word must not hold up its callers for the kernel's fifteen minutes
            "tcp_user_timeout": 10_000,
            "options": " ".join([str(given), *(f"-c {name}={value}" for name, value in settings.items())]),
        }

    @property
    def _shown(self) -> str:
        host = self._url.host or self._url.query.get("host") or "this machine"
        return f"{self._url.database!r} on {host}"

    def _without_password(self, text: str) -> str:
        password = str(self._url.password or self._url.query.get("password") or "")
        return "its words hold the password and are left out" if password and password in text else text


_TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"

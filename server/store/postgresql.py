"""A database on a PostgreSQL server: judging it before use, its connections, and what its errors mean.

Imported only when a URL asks for it, because the driver is an optional part of the installation.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from psycopg import errors
from sqlalchemy import URL, Connection, create_engine, event, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from server.store.migrations import HEAD, VERSION_TABLE
from server.store.schema import StoreError, known_version

_STATEMENT_TIMEOUT_SECONDS = 30
_TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"


class PostgresqlServer:
    """One database. What `sqlite.SqliteFile` has too is described in `database.Database`."""

    writer_turn = nullcontext()  # rows are locked, not the database
    driver_error = errors.Error
    begin_without_sync = "SET LOCAL synchronous_commit = off"

    def __init__(self, url: URL, busy_timeout_seconds: float) -> None:
        self._url = url
        self._busy_timeout_seconds = busy_timeout_seconds

    def engine(self, *, blocking: bool) -> Any:
        given = self._url.query.get("options", "")
        settings = {
            "lock_timeout": f"{max(1, round(self._busy_timeout_seconds * 1000))}",
            "statement_timeout": f"{_STATEMENT_TIMEOUT_SECONDS}s",
            "idle_in_transaction_session_timeout": f"{_STATEMENT_TIMEOUT_SECONDS}s",
            "synchronous_commit": "on",
        }
        engine = (create_engine if blocking else create_async_engine)(
            self._url,
            connect_args={
                "application_name": "hearth",
                "client_encoding": "utf8",
                "connect_timeout": max(2, round(self._busy_timeout_seconds)),
                # A server that vanished without a word must not hold up its callers for the kernel's fifteen minutes
                "tcp_user_timeout": 10_000,
                "options": " ".join([str(given), *(f"-c {name}={value}" for name, value in settings.items())]),
            },
            hide_parameters=True,  # errors must not carry hashes
            pool_size=1 if blocking else 5,
            max_overflow=0,
            pool_timeout=self._busy_timeout_seconds,
            pool_pre_ping=True,  # the server may have been restarted since
            pool_recycle=1800,  # seconds, before a firewall forgets an idle connection
        )
        event.listen(getattr(engine, "sync_engine", engine), "begin", _begin)
        return engine

    async def prepare(self, engine: AsyncEngine) -> str | None:
        try:
            async with engine.execution_options(durable=True).connect() as connection:
                return await self._judge(connection)
        except (exc.DBAPIError, OSError) as error:
            reason = " ".join(str(getattr(error, "orig", None) or error).split())
            password = str(self._url.password or self._url.query.get("password") or "")
            if password and password in reason:
                reason = "its words hold the password and are left out"
            raise StoreError(
                f"The key database {self._shown} cannot be used (PostgreSQL: {reason}). Check "
                "that the server runs, that host, port, user, password and database in the URL are right, and that "
                "pg_hba.conf lets this machine in."
            ) from error

    def check(self) -> None:
        """Nothing to do: a database that was dropped or moved answers with an error."""

    def error_message(self, error: BaseException) -> str:
        if isinstance(error, (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected)):
            return "The key database is busy. Try again in a few seconds."
        return (
            "The key database does not answer. Try again in a few seconds; if it stays so, check that the "
            "PostgreSQL server runs and can be reached."
        )

    async def backup(self, _: Path) -> None:
        raise StoreError(
            f"A PostgreSQL database is backed up with PostgreSQL's own tool: pg_dump --format=custom --file=FILE "
            f"{self._url.database}"
        )

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
        found = await ask(f"SELECT version_num FROM {VERSION_TABLE}") if VERSION_TABLE in tables else None  # noqa: S608
        version = known_version(self._shown, tables, found)
        if version != HEAD and not await ask("SELECT has_schema_privilege(current_schema(), 'CREATE')"):
            raise StoreError(
                f"The user of {self._shown} may not create tables there. As PostgreSQL's administrator, run: "
                f'ALTER DATABASE "{self._url.database}" OWNER TO "{self._url.username}"'
            )
        return version

    @property
    def _shown(self) -> str:
        host = self._url.host or self._url.query.get("host") or "this machine"
        return f"{self._url.database!r} on {host}"


def _begin(connection: Connection) -> None:
    durable = connection.get_execution_options().get("durable")
    if durable is None:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    elif not durable:
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")

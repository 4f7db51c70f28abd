"""A database on a PostgreSQL server: judging it before use, its connections, and what its errors mean.

Imported only when a URL asks for it, because the driver is an optional part of the installation.
"""

import os
import select
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from psycopg import errors
from sqlalchemy import URL, Connection, create_engine, event, exc, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from server.store import StoreError
from server.store.migrations import HEAD, VERSION_TABLE, known_version

_STATEMENT_TIMEOUT_SECONDS = 30
_CONNECT_TIMEOUT_SECONDS = 3  # for each host that the URL names
_IS_STANDBY = text("SELECT pg_is_in_recovery()")
_TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"


class PostgresqlServer:
    """One database. What `sqlite.SqliteFile` has too is described in `database.Database`."""

    writer_turn = nullcontext()  # rows are locked, not the database
    driver_error = errors.Error
    begin_without_sync = None  # the driver begins, and blocking connections never wait for the disk

    def __init__(self, url: URL, busy_timeout_seconds: float) -> None:
        self._url = url
        self._busy_timeout_seconds = busy_timeout_seconds
        self._lines: WeakSet[Any] = WeakSet()

    def engine(self, *, blocking: bool) -> Any:
        given = self._url.query.get("options", "")
        settings = {
            "lock_timeout": f"{max(1, round(self._busy_timeout_seconds * 1000))}",
            "statement_timeout": f"{_STATEMENT_TIMEOUT_SECONDS}s",
            "idle_in_transaction_session_timeout": f"{_STATEMENT_TIMEOUT_SECONDS}s",
            "synchronous_commit": "off" if blocking else "on",
        }
        engine = (create_engine if blocking else create_async_engine)(
            self._url,
            connect_args={
                "application_name": "hearth",
                "client_encoding": "utf8",
                "connect_timeout": _CONNECT_TIMEOUT_SECONDS,
                # A server that vanished without a word must not hold up its callers for the kernel's fifteen minutes
                "tcp_user_timeout": 10_000,
                # Nor may a firewall forget a connection that is not used for minutes
                "keepalives_idle": 60,
                "keepalives_interval": 10,
                "keepalives_count": 3,
                "options": " ".join([str(given), *(f"-c {name}={value}" for name, value in settings.items())]),
            },
            hide_parameters=True,  # errors must not carry hashes
            pool_size=1 if blocking else 5,
            max_overflow=0,
            pool_timeout=self._busy_timeout_seconds,
            pool_recycle=1800,  # seconds, before a firewall forgets an idle connection
        )
        core = getattr(engine, "sync_engine", engine)
        event.listen(core, "begin", _begin)
        event.listen(core, "connect", self._remember)
        event.listen(core, "checkout", _check_line)
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

    async def look(self, connection: AsyncConnection) -> None:
        """Raise an error unless it can be written to."""
        if await connection.scalar(_IS_STANDBY):
            raise errors.ReadOnlySqlTransaction

    def check_space(self) -> None:
        """Nothing to do: the server has its own disk."""

    def cut_lines(self) -> None:
        """Have all that waits for the server fail at once: libpq itself waits forever, even after a cancel."""
        for line in list(self._lines):
            with suppress(errors.Error, OSError), socket.socket(fileno=os.dup(line.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def _remember(self, _: object, record: ConnectionPoolEntry) -> None:
        self._lines.add(record.driver_connection)

    def error_message(self, error: BaseException) -> str:
        if isinstance(error, (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected)):
            return "The key database is busy. Try again in a few seconds."
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return "The key database is read-only, as a standby is before it is promoted. Try again in a few seconds."
        if self.is_unwritable(error):
            return "The disk of the key database is full. Free space there; all goes on by itself then."
        return (
            "The key database does not answer. Try again in a few seconds; if it stays so, check that the "
            "PostgreSQL server runs and can be reached."
        )

    def is_unwritable(self, error: BaseException | None) -> bool:
        return isinstance(error, errors.DiskFull)

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
                f"The key database {self._shown} stores text as {encoding}. Create it again: CREATE DATABASE "
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
        hosts = self._url.query.get("host", ())
        named = self._url.host or (hosts if isinstance(hosts, str) else " or ".join(hosts)) or "this machine"
        return f"{self._url.database!r} on {named}"


def _check_line(_: object, record: ConnectionPoolEntry, __: object) -> None:
    """Have the pool connect anew if an idle connection has data to read: the server has closed it, at a restart.

    SQLAlchemy's own check waits for an answer of the server before each transaction.
    """
    connection: Any = record.driver_connection
    if connection.closed:
        raise exc.DisconnectionError
    line = select.poll()
    line.register(connection.fileno(), select.POLLIN)
    if line.poll(0):
        raise exc.DisconnectionError


def _begin(connection: Connection) -> None:
    durable = connection.get_execution_options().get("durable")
    if durable is None:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    elif not durable:
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")

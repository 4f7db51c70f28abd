"""A real PostgreSQL server of the tests' own, from Debian's package, behind a socket in a temporary folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import psutil
from serving import poll_until
from sqlalchemy import URL, make_url

PASSWORD = "swordfish/:@%1"
USER = "hearth"


def missing_reason() -> str | None:
    """Why there can be no server here, or None."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed (pip install 'psycopg[binary]')"
    if _programs() is None:
        return "PostgreSQL is not installed (apt-get install postgresql)"
    return None


def _programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


class Postgres:
    """Use as `with`. Every connection needs the password, so that a leak of it would be seen.

    With `primary` it is its standby: a copy that follows it until it is promoted.
    """

    def __init__(self, primary: "Postgres | None" = None) -> None:
        self._primary = primary
        self._programs = _programs() or Path()
        self._user = _unprivileged_user()
        self.folder = Path(tempfile.mkdtemp(prefix="hearth-pg-"))  # not pytest's: a socket's path must be short
        self._made = 0

    def __enter__(self) -> Self:
        password = self.folder / "password"
        password.write_text(PASSWORD)
        if self._user is not None:
            for path in (self.folder, password):
                shutil.chown(path, self._user)
        if self._primary is not None:
            self._run("pg_basebackup", "-R", "-c", "fast", "-h", str(self._primary.folder), "-U", USER)
            self.start()
            return self
        settings = ["-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8", "-U", USER]
        self._run("initdb", *settings, f"--pwfile={password}")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(AssertionError):  # it does not run
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses= -c fsync=off -c max_connections=60"
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def kill(self) -> None:
        """All of its processes, by SIGKILL."""
        processes = self._processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 10)

    def freeze(self) -> None:
        """Its lines stay open, and whoever asks waits."""
        for process in self._processes():
            process.suspend()

    def thaw(self) -> None:
        for process in self._processes():
            process.resume()

    def promote(self) -> None:
        """Make a standby the primary."""
        self._run("pg_ctl", "-w", "promote")

    @contextmanager
    def followed(self) -> Iterator["Postgres"]:
        """A standby that has what this one has acknowledged, until the end of the block."""
        with Postgres(self) as standby:
            self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
            try:
                poll_until(
                    lambda: self._scalar("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"), 20
                )
                yield standby
            finally:
                (self.folder / "data" / "postgresql.auto.conf").write_text("")
                with suppress(AssertionError):  # killed
                    self.stop()
                self.start()

    def _scalar(self, query: str) -> int:
        import psycopg

        with psycopg.connect(host=str(self.folder), user=USER, password=PASSWORD, dbname="postgres") as connection:
            row = connection.execute(query).fetchone()  # type: ignore[call-overload]
            return int(row[0])

    def _processes(self) -> list[psutil.Process]:
        server = psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().splitlines()[0]))
        return [server, *server.children()]

    def stop(self) -> None:
        """At once, as in a crash."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def new_schema(self) -> str:
        """The URL of an empty schema in a database shared by all tests: made in a tenth of a database's time."""
        self._made += 1
        self.execute(f"CREATE SCHEMA test_{self._made}")
        url = make_url(self.url("postgres")).update_query_dict({"options": f"-csearch_path=test_{self._made}"})
        return url.render_as_string(hide_password=False)

    def new_database(self, options: str = "") -> str:
        """The URL of an empty database."""
        self._made += 1
        self.execute(f"CREATE DATABASE test_{self._made} {options}")
        return self.url(f"test_{self._made}")

    def execute(self, *statements: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(
            host=str(self.folder), user=USER, password=PASSWORD, dbname=database, autocommit=True
        ) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]

    def url(self, database: str, *, user: str = USER, password: str = PASSWORD) -> str:
        url = URL.create("postgresql+psycopg", user, password, database=database, query={"host": str(self.folder)})
        return url.render_as_string(hide_password=False)

    def _run(self, program: str, *arguments: str) -> None:
        command: Sequence[str] = [str(self._programs / program), "-D", str(self.folder / "data"), *arguments]
        # Not captured through a pipe: the server would keep it open
        with (self.folder / "output").open("w+") as output:
            result = subprocess.run(
                command,
                stdout=output,
                stderr=output,
                user=self._user,
                cwd="/",
                env={**os.environ, "PGPASSWORD": PASSWORD},
                timeout=60,
                check=False,
            )
            output.seek(0)
            assert result.returncode == 0, f"{program}: {output.read()}"


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    with suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"

"""A real PostgreSQL server of the tests' own, from Debian's package, behind a socket in a temporary folder."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

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
    """Use as `with`. Every connection needs the password, so that a leak of it would be seen."""

    def __init__(self) -> None:
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
        settings = ["-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8", "-U", USER]
        self._run("initdb", *settings, f"--pwfile={password}")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses= -c fsync=off -c max_connections=60"
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

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
                command, stdout=output, stderr=output, user=self._user, cwd="/", timeout=60, check=False
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

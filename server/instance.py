"""One server per data directory: a lock that its process holds, and by which `hearth reload` finds it."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from server import reload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE = "server.lock"


class InstanceError(Exception):
    """Another server uses the data directory, or none does; the message says what to do."""


@contextmanager
def only_one(data_dir: Path) -> Iterator[None]:
    """Hold the directory until the block or the process ends. Raises `InstanceError` if somebody else holds it."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (data_dir / _FILE).open("a+", encoding="ascii") as file:
        try:
            # Freed with the last copy of the open file; engines are started by exec, which closes theirs.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise InstanceError(
                f"Another Hearth (process {file.read().strip() or 'unknown'}) uses the data directory {data_dir}. Pick "
                "one: 1. stop it; 2. give this one its own directory with --data-dir."
            ) from error
        (data_dir / reload.FILE).unlink(missing_ok=True)  # of a server before, perhaps with this process id
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def running_pid(data_dir: Path) -> int | None:
    """Return the process id of the server of this directory, None if there is none."""
    with suppress(OSError), (data_dir / _FILE).open("r+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return int(file.read().strip() or 0) or None
    return None


def ask_to_reload(data_dir: Path) -> int:
    """Send SIGHUP to the server of this directory and return its process id. Raises `InstanceError`."""
    pid = running_pid(data_dir)
    if pid is not None:
        with suppress(OSError):
            os.kill(pid, signal.SIGHUP)
            return pid
    raise InstanceError(
        f"No Hearth runs on the data directory {data_dir}. Start one with scripts/serve, or name the directory of the "
        "one that runs with --data-dir."
    )

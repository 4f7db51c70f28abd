"""The server of a data directory: a lock, a signal to reload, and a file with the outcome of a reload."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
import psutil

OUTCOME_FILE = "reload.json"
_LOCK_FILE = "server.lock"
_POLL_SECONDS = 0.05
_LOCK_TRIES = 5


class InstanceError(Exception):
    """Another server uses the data directory, or none does; the message says what to do."""


@contextmanager
def only_one(data_dir: Path) -> Iterator[None]:
    """Lock the directory, made if need be, until the block or the process ends.

    Raises `InstanceError` if another process has it, or if nothing can be written there.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = (data_dir / _LOCK_FILE).open("a+", encoding="ascii")
    except OSError as error:
        raise InstanceError(
            f"The data directory {data_dir} cannot be used: {error.strerror}. Pick one: 1. check that it is a folder "
            "that this user may write to; 2. name another one with --data-dir."
        ) from error
    with opened as file:
        try:
            # Released with the last copy of the open file; engines are started by exec, which closes theirs.
            _lock(file)
        except OSError as error:
            file.seek(0)
            raise InstanceError(
                f"Another Hearth (process {file.read().strip() or 'unknown'}) uses the data directory {data_dir}. Pick "
                "one: 1. stop it; 2. give this one its own directory with --data-dir."
            ) from error
        (data_dir / OUTCOME_FILE).unlink(missing_ok=True)  # of an earlier server, perhaps with this process id
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def _lock(file: TextIO) -> None:
    """Lock a file, waiting while `running_pid` has it for a moment. Raises `OSError` if another process keeps it."""
    for left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def running_pid(data_dir: Path) -> int | None:
    """Return the process id of the server of this directory, None if there is none."""
    with suppress(OSError), (data_dir / _LOCK_FILE).open("r+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return int(file.read().strip() or 0) or None
    return None


def ask_to_reload(data_dir: Path) -> int:
    """Send SIGHUP to the server of this directory and return its process id.

    Raises `InstanceError`, or `PermissionError` where it is another user's.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        (data_dir / _LOCK_FILE).open("r+", encoding="ascii").close()
    pid = running_pid(data_dir)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
            return pid
    raise no_server(data_dir)


def no_server(data_dir: Path) -> InstanceError:
    return InstanceError(
        f"No Hearth runs on the data directory {data_dir}. Start one with scripts/serve, or name the directory of the "
        "one that runs with --data-dir."
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Names that were added, changed or removed."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def sentences(self, what: str = "") -> list[str]:
        parts = (("added", self.added), ("changed", self.changed), ("removed", self.removed))
        return [f"{what}{verb}: {', '.join(names)}" for verb, names in parts if names]


@dataclass(frozen=True, slots=True)
class Renewal:
    """Whether new connections get another TLS certificate than before.

    `refused`: why the old one stays, for the operator; it names files.
    """

    renewed: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one reload. `refused` says why it was refused, and then nothing has changed.

    `began_at_ns` is when reading the file began, by the machine's monotonic clock: this is the outcome for every
    reload that was requested before.
    """

    pid: int
    began_at_ns: int
    path: str
    refused: str | None = None
    models: Difference = Difference()
    voices: Difference = Difference()
    warnings: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    """Models that end with their last answer and are then loaded again."""
    later: tuple[str, ...] = ()
    """Models that keep their memory until they are loaded again."""
    certificate: Renewal | None = None
    """None: the server speaks plain HTTP."""

    def sentences(self) -> list[str]:
        """Say what has changed; empty when nothing has."""
        changed = self.models.sentences()
        changed += [f"{', '.join(self.again)}: 503 until loaded again, after the last answer"] if self.again else []
        later = [f"{', '.join(self.later)}: a new share of memory when next loaded"] if self.later and changed else []
        certificate = ["the TLS certificate is renewed"] if self.certificate and self.certificate.renewed else []
        return [*changed, *self.voices.sentences("voices "), *later, *certificate]


def write_outcome(data_dir: Path, outcome: Outcome) -> None:
    """Replace the file of the last outcome. Blocks. Raises OSError."""
    from engine.files import write_atomically

    write_atomically(data_dir / OUTCOME_FILE, msgspec.json.encode(outcome))


def wait_for_outcome(data_dir: Path, pid: int, asked_at_ns: int, seconds: float) -> Outcome | None:
    """Return the outcome of a reload that was asked for at `asked_at_ns`; None if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and psutil.pid_exists(pid):
        with suppress(OSError, msgspec.DecodeError):  # none yet, or of another release
            outcome = msgspec.json.decode((data_dir / OUTCOME_FILE).read_bytes(), type=Outcome)
            if outcome.pid == pid and outcome.began_at_ns >= asked_at_ns:
                return outcome
        time.sleep(_POLL_SECONDS)
    return None

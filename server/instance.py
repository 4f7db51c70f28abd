"""The server of a data directory: a lock, a signal to reload, what a reload does, and a file with the outcome."""

import asyncio
import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
from fastapi import FastAPI

from engine import Config, ConfigError, Engine, load_config
from engine.files import write_atomically
from server.http.tls import TlsError
from server.store.audit import Actor, write_entry
from server.store.schema import StoreUnavailableError, utc_now

OUTCOME_FILE = "reload.json"
_LOCK_FILE = "server.lock"
_POLL_SECONDS = 0.05
_log = logging.getLogger("hearth.reload")


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
            # Freed with the last copy of the open file; engines are started by exec, which closes theirs.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise InstanceError(
                f"Another Hearth (process {file.read().strip() or 'unknown'}) uses the data directory {data_dir}. Pick "
                "one: 1. stop it; 2. give this one its own directory with --data-dir."
            ) from error
        (data_dir / OUTCOME_FILE).unlink(missing_ok=True)  # of a server before, perhaps with this process id
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def running_pid(data_dir: Path) -> int | None:
    """Return the process id of the server of this directory, None if there is none."""
    with suppress(OSError), (data_dir / _LOCK_FILE).open("r+", encoding="ascii") as file:
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
    raise no_server(data_dir)


def no_server(data_dir: Path) -> InstanceError:
    return InstanceError(
        f"No Hearth runs on the data directory {data_dir}. Start one with scripts/serve, or name the directory of the "
        "one that runs with --data-dir."
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs from before, by name."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def sentences(self, what: str = "") -> list[str]:
        parts = (("added", self.added), ("changed", self.changed), ("removed", self.removed))
        return [f"{what}{verb}: {', '.join(names)}" for verb, names in parts if names]


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the TLS certificate: whether connections from now on are shown another one than before.

    `refused`: why it stays as it was, for the operator; it names files.
    """

    renewed: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one reload. `refused` has the reason, and then nothing has changed.

    `began_at_ns` is when the file was about to be read, by the machine's monotonic clock: this answers every
    request for a reload from before that.
    """

    pid: int
    began_at_ns: int
    path: str
    refused: str | None = None
    models: Difference = Difference()
    voices: Difference = Difference()
    warnings: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    """Models that keep the memory that they have until they are loaded again."""
    certificate: Renewal | None = None
    """None: plain HTTP is spoken."""

    def sentences(self) -> list[str]:
        """Say what has changed; empty when nothing has."""
        later = [f"at the next load, the memory that is planned now: {', '.join(self.later)}"] if self.later else []
        certificate = ["the TLS certificate is renewed"] if self.certificate and self.certificate.renewed else []
        return [*self.models.sentences(), *self.voices.sentences("voices "), *later, *certificate]


def write_outcome(data_dir: Path, outcome: Outcome) -> None:
    """Replace the one before, whole. Blocks. Raises OSError."""
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


async def reload_config(app: FastAPI) -> None:
    """Do what a SIGHUP asks for, and report the outcome in the log and to `hearth reload`."""
    began_at_ns, path = time.monotonic_ns(), str(app.state.settings.models)
    certificate = renew_certificate(app)
    try:
        outcome = replace(await take_over(app, None), certificate=certificate)
    except ConfigError as error:
        _log.error("models.yaml was not taken over: %s\nEverything stays as it was.", error.message)
        outcome = Outcome(os.getpid(), began_at_ns, path, error.message, certificate=certificate)
    else:
        changes = outcome.sentences()
        level = logging.WARNING if changes else logging.INFO
        _log.log(level, "models.yaml was read again: %s.", "; ".join(changes) or "nothing has changed")
    try:
        async with app.state.reloading:  # in the order in which they began
            await asyncio.to_thread(write_outcome, app.state.settings.data_dir, outcome)
    except OSError as error:
        _log.error("the outcome of the reload cannot be written for `hearth reload`: %s", error.strerror)


def renew_certificate(app: FastAPI) -> Renewal | None:
    """Show from now on the certificate that its files hold now; a pair that cannot be used leaves the old one."""
    if app.state.certificate is None:
        return None
    try:
        return Renewal(renewed=app.state.certificate.renew())
    except TlsError as error:
        _log.error("The TLS certificate stays as it was. %s", error)  # ours, no trace needed
        return Renewal(refused=str(error))


async def take_over(app: FastAPI, by: Actor | None) -> Outcome:
    """Read the file again; tiers, models and voices are from then on what is there. Answers that are given go on.

    `by` None means the user of this machine. Raises `ConfigError`, and then nothing has changed. The outcome's
    `warnings` are about voices, the old ones among them: what is still wrong is said again.
    """
    began_at_ns, path = time.monotonic_ns(), app.state.settings.models
    async with app.state.reloading:  # of two at once, the one that read the file last has to win
        config = await asyncio.to_thread(load_config, path)
        engine: Engine = app.state.engine
        before = _voices(engine)
        models = _difference(_named(engine.config), _named(config))
        outdated = await engine.reload(config)
        models = replace(models, changed=tuple(dict.fromkeys((*models.changed, *sorted(outdated)))))
        app.state.metrics.models = config.models
        voices = _difference(before, _voices(engine))
        warnings = tuple(f"{model}: {remark}" for model in config.models for remark in engine.voice_warnings(model))
        try:
            async with app.state.database.writing() as connection:
                await write_entry(connection, utc_now(), by, "config.reload", config.path.name, asdict(models))
        except StoreUnavailableError as error:  # it has happened already: better unwritten than called a failure
            _log.error("the audit log lacks this: models.yaml was read again. %s", error.message)
        return Outcome(os.getpid(), began_at_ns, str(path), None, models, voices, warnings, engine.later())


def _named(config: Config) -> dict[str, Any]:
    return {**config.models, **{f"tier {name}": tier for name, tier in config.tiers.items()}}


def _voices(engine: Engine) -> dict[str, Any]:
    return {voice.id: voice for model in engine.config.models for voice in engine.voices(model)}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    return Difference(
        added=tuple(name for name in after if name not in before),
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        removed=tuple(name for name in before if name not in after),
    )

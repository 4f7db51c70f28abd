"""Takes a changed models.yaml, and new voices, into the running server. A wrong file changes nothing.

What came of the last reload: a small file in the data directory, by which the server answers `hearth reload`.

When to reload and what it means is reload.py's; the signal that asks for it is instance.py's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from engine import ConfigError, load_config
from engine.files import write_atomically
from server.http.tls import TlsError
from server.store import AuditLog, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fastapi import FastAPI

    from engine import Config, Engine
    from server.store import Actor


_log = logging.getLogger("hearth.reload")


@dataclass(frozen=True, slots=True)
class Taken:
    """What is served now, and in which models, tiers and voices that differs from before.

    `warnings` are about voices, the old ones among them: what is still wrong is said again.
    """

    config: Config
    models: Difference
    voices: Difference
    warnings: tuple[str, ...]
    later: tuple[str, ...]
    """Models that keep the memory that they have until they are loaded again."""


async def reload_config(app: FastAPI) -> None:
    """Do what a SIGHUP asks for, and say in the log, and to `hearth reload`, what came of it."""
    began_at_ns, path = time.monotonic_ns(), str(app.state.settings.models)
    certificate = renew_certificate(app)
    try:
        taken = await take_over(app, None)
    except ConfigError as error:
        _log.error("models.yaml was not taken over: %s\nEverything stays as it was.", error.message)
        outcome = Outcome(os.getpid(), began_at_ns, path, error.message, certificate=certificate)
    else:
        outcome = Outcome(
            os.getpid(), began_at_ns, path, None, taken.models, taken.voices, taken.warnings, taken.later, certificate
        )
        changes = outcome.sentences()
        level = logging.WARNING if changes else logging.INFO
        _log.log(level, "models.yaml was read again: %s.", "; ".join(changes) or "nothing has changed")
    try:
        async with app.state.reloading:  # in the order in which they began
            await asyncio.to_thread(write, app.state.settings.data_dir, outcome)
    except OSError as error:
        _log.error("what came of the reload cannot be told to `hearth reload`: %s", error.strerror)


def renew_certificate(app: FastAPI) -> Renewal | None:
    """Show from now on the certificate that its files hold now; a pair that cannot be used leaves the old one."""
    if app.state.certificate is None:
        return None
    try:
        return Renewal(renewed=app.state.certificate.renew())
    except TlsError as error:
        _log.error("The TLS certificate stays as it was. %s", error)  # ours, no trace needed
        return Renewal(refused=str(error))


async def take_over(app: FastAPI, by: Actor | None) -> Taken:
    """Read the file again; tiers, models and voices are from then on what is there. Answers that are given go on.

    `by` None means the user of this machine. Raises `ConfigError`, and then nothing has changed.
    """
    async with app.state.reloading:  # of two at once, the one that read the file last has to win
        config = await asyncio.to_thread(load_config, app.state.settings.models)
        engine: Engine = app.state.engine
        before = _voices(app.state.config, engine)
        models = _difference(_named(app.state.config), _named(config))
        outdated = await engine.reload(config)
        models = replace(models, changed=tuple(dict.fromkeys((*models.changed, *sorted(outdated)))))
        app.state.access.use(config)
        app.state.meter.limiter.use(config)
        app.state.config = config
        voices = _difference(before, _voices(config, engine))
        warnings = tuple(f"{model}: {remark}" for model in config.models for remark in engine.voice_warnings(model))
        detail = {"added": models.added, "changed": models.changed, "removed": models.removed}
        try:
            await AuditLog(app.state.database).record("config.reload", config.path.name, detail, by=by)
        except StoreUnavailableError as error:  # it has happened already: better unwritten than called a failure
            _log.error("the audit log lacks this: models.yaml was read again. %s", error.message)
        return Taken(config, models, voices, warnings, engine.later())


def _named(config: Config) -> dict[str, Any]:
    return {**config.models, **{f"tier {name}": tier for name, tier in config.tiers.items()}}


def _voices(config: Config, engine: Engine) -> dict[str, Any]:
    return {voice.id: voice for model in config.models for voice in engine.voices(model)}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    return Difference(
        added=tuple(name for name in after if name not in before),
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        removed=tuple(name for name in before if name not in after),
    )


FILE = "reload.json"
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs from before, by name."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def sentences(self, what: str = "") -> list[str]:
        """Return like `added a, b`, with `what` before it."""
        parts = (("added", self.added), ("changed", self.changed), ("removed", self.removed))
        return [f"{what}{verb}: {', '.join(names)}" for verb, names in parts if names]


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the certificate: whether it is another one now, or why it stays as it was."""

    renewed: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the server says of one reload. `refused` has the reason, and then nothing has changed.

    `began_at_ns` is when the file was about to be read, by the machine's monotonic clock: whoever asked before that
    has their answer here, however many asked.
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


def write(data_dir: Path, outcome: Outcome) -> None:
    """Put it in the place of the one before, whole. Blocks. Raises OSError."""
    write_atomically(data_dir / FILE, msgspec.json.encode(outcome))


def wait_for(data_dir: Path, pid: int, asked_at_ns: int, seconds: float) -> Outcome | None:
    """Return what this server says of a reload that was asked for at `asked_at_ns`; None if it does not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _is_alive(pid):
        outcome = _read(data_dir / FILE)
        if outcome is not None and outcome.pid == pid and outcome.began_at_ns >= asked_at_ns:
            return outcome
        time.sleep(_POLL_SECONDS)
    return None


def _read(file: Path) -> Outcome | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):  # none yet, or of another release
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

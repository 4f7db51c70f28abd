"""What came of the last reload: a small file in the data directory, by which the server answers `hearth reload`.

When to reload and what it means is reload.py's; the signal that asks for it is instance.py's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.files import write_atomically

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

    `began_at_ns` is when the file was about to be read, by the machine's monotonic clock: it answers every reload
    that was asked for before.
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
    except (OSError, msgspec.DecodeError):  # none so far, or of another release
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

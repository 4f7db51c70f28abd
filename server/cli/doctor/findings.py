"""What `hearth doctor` looks at and what a check finds, as plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from engine import Config
from engine.hardware import Cuda, Hardware
from engine.placement_types import Plan, Refusal
from server.schemas.status import Status
from server.settings import Settings

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class Case:
    """The machine and the configuration that are looked at. `running` is the server, None where none answers.

    `config` and `plan` are None where models.yaml cannot be read.
    """

    settings: Settings
    config: Config | None
    hardware: Hardware
    cuda: Cuda
    on_cpu_build: bool
    plan: Plan | Refusal | None
    running: Status | None
    full: bool = False
    """Also hash all weights that were fetched."""
    unloaded: bool = False
    """Also ask models that await their turn."""
    now: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Finding:
    """How one thing is, and what to do about it where it is not well."""

    verdict: Verdict
    message: str
    remedy: str | None = None
    seconds: float | None = None
    """How long a request took."""


def ok(message: str) -> Finding:
    """Return that something is well."""
    return Finding("ok", message)


def warning(message: str, remedy: str | None = None) -> Finding:
    """Return what works, and may not for long."""
    return Finding("warning", message, remedy)


def problem(message: str, remedy: str | None = None) -> Finding:
    """Return what does not work."""
    return Finding("problem", message, remedy)


def skipped(message: str, remedy: str | None = None) -> Finding:
    """Return what could not be looked at."""
    return Finding("skipped", message, remedy)

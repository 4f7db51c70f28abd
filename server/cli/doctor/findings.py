"""What `hearth doctor` looks at and what a check finds, as plain data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from engine import Config
from engine.placement.hardware import Cuda, Hardware
from engine.placement.types import Plan, Refusal
from server.observability.status import Status
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


ok, warning = partial(Finding, "ok"), partial(Finding, "warning")
problem, skipped = partial(Finding, "problem"), partial(Finding, "skipped")

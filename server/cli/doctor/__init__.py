"""What `hearth doctor` looks at, and what a check finds: plain data."""

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from engine import Config
from engine.backends.vllm.processes import runs_on_cpu
from engine.placement.hardware import Cuda, Hardware, read_cuda
from engine.placement.needs import Footprints, own_folders
from engine.placement.plan import plan
from engine.placement.types import Plan, Refusal
from server.cli.options import hardware_for
from server.observability.status import Status
from server.settings import Settings


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
    """Also test models that are not loaded."""
    now: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Finding:
    """How one thing is, and what to do about it where it is not well."""

    verdict: Literal["ok", "warning", "problem", "skipped"]
    message: str
    remedy: str | None = None
    seconds: float | None = None
    """How long a request took."""


ok, warning = partial(Finding, "ok"), partial(Finding, "warning")
problem, skipped = partial(Finding, "problem"), partial(Finding, "skipped")


def case_of(given: Settings, config: Config | None, running: Status | None) -> Case:
    """Look at the machine and make the plan for it (some 100 ms). What a running server has taken counts as free."""
    hardware, on_cpu = hardware_for(given), runs_on_cpu()
    planned = replace(hardware, gpus=()) if on_cpu else hardware
    found = None
    if config is not None:
        found = plan(config, planned, Footprints.read(given.data_dir), own_folders(config, given.weights_dir))
    return Case(given, config, hardware, read_cuda(), on_cpu_build=on_cpu, plan=found, running=running)

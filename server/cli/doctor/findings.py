"""What `hearth doctor` looks at and what it finds, as plain data. Its checks are in this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engine import Config
    from engine.hardware import Cuda, Hardware
    from engine.placement_types import Plan, Refusal
    from server.schemas.status import Status
    from server.settings import Settings

Verdict = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it where it is not well."""

    area: str
    verdict: Verdict
    message: str
    remedy: str | None = None
    seconds: float | None = None
    """How long a request took."""

    def as_data(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {
            "area": self.area,
            "verdict": self.verdict,
            "message": self.message,
            "remedy": self.remedy,
            "seconds": None if self.seconds is None else round(self.seconds, 4),
        }


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

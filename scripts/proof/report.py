"""What a proof saw: steps with figures, each of which may fail or run out of time without ending the others."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Step:
    """One thing that was tried. `figures` are numbers with their unit in the name, or short words."""

    name: str
    passed: bool = True
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    skipped: bool = False
    """Whether this machine has nothing to try it with; `problem` says what is missing."""


class Skipped(Exception):  # noqa: N818  # no error
    """There is nothing to try here; the message says what is missing."""


@dataclass
class Proof:
    """All steps on one machine. Written to `out` after each, so that nothing is lost where the machine stops."""

    machine: str
    driver: str | None
    began_at: str
    rehearsal: bool
    out: Path
    weights: str = "fetched"
    steps: list[Step] = field(default_factory=list)

    async def try_step(
        self, name: str, work: Callable[[], Awaitable[dict[str, Any]]], limit_seconds: float = 900.0
    ) -> bool:
        """Do one step; whatever it raises is its problem, and no other step's. Return whether it passed."""
        print(f"[{time.strftime('%H:%M:%S')}] {name}", file=sys.stderr, flush=True)
        step, begun = Step(name), time.monotonic()
        try:
            async with asyncio.timeout(limit_seconds):
                step.figures = await work()
        except Skipped as reason:
            step.skipped, step.problem = True, str(reason)
        except TimeoutError:
            step.passed, step.problem = False, f"not done after {limit_seconds:.0f} s"
        except Exception as error:  # noqa: BLE001  # the report says what it was
            step.passed, step.problem = False, f"{type(error).__name__}: {error}"
        step.seconds = round(time.monotonic() - begun, 2)
        if not step.passed:
            print(f"    failed: {' '.join((step.problem or '').split())[:300]}", file=sys.stderr, flush=True)
        self.steps.append(step)
        self.write()
        return step.passed and not step.skipped

    @property
    def failed(self) -> int:
        return sum(not step.passed for step in self.steps)

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        document = {name: value for name, value in asdict(self).items() if name != "out"}
        (self.out / "proof.json").write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
        (self.out / "proof.md").write_text(as_markdown(self), encoding="utf-8")


def as_markdown(proof: Proof) -> str:
    what = "A rehearsal without a GPU." if proof.rehearsal else f"Driver {proof.driver}."
    skipped = sum(step.skipped for step in proof.steps)
    counted = f"{proof.failed} of {len(proof.steps)} steps failed, {skipped} were skipped."
    lines = [f"# Proof of {proof.began_at}", "", f"{proof.machine}. {what} Weights: {proof.weights}. {counted}"]
    lines += ["", "| step | | seconds | saw |", "|---|---|---|---|"]
    for step in proof.steps:
        saw = "; ".join(f"{key}: {value}" for key, value in step.figures.items()) or step.problem or ""
        state = "skipped" if step.skipped else "ok" if step.passed else "FAILED"
        cells = (step.name, state, f"{step.seconds}", saw)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

"""The report of a proof: steps with figures, and the tokens a second that memory allows, to compare with.

A step may fail or run out of time without ending the others. As a program it prints how fast memory is: that needs only
torch, and nothing stays on the GPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_COPIED_BYTES = 4 << 30
_TIMES = 8


@dataclass
class Step:
    """One step. `figures` are numbers with their unit in the name, or short words."""

    name: str
    passed: bool = True
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    skipped: bool = False
    """This machine cannot run it; `problem` says what is missing."""


class Skipped(Exception):  # noqa: N818  # no error
    """This machine cannot run the step; the message says what is missing."""


@dataclass
class Proof:
    """All steps on one machine. Written to `out` after each, so that nothing is lost if the machine stops."""

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
        """Do one step; an error ends only this step. Return whether it passed."""
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


def bandwidth() -> float:
    """Return the bytes a second that a large copy on the GPU reads and writes, the best of several."""
    import torch

    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_TIMES):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * _COPIED_BYTES / (time.perf_counter() - begun))
    return best


def tokens_per_second(config: dict[str, Any], weights_bytes: float, streams: int, bytes_per_second: float) -> float:
    """Return how many tokens a second are possible if each step reads the weights that it uses once.

    KV caches, which are read too, are left out: for short conversations they are small compared to the weights.
    """
    return streams * bytes_per_second / (weights_bytes * _part_used(config, streams))


def _part_used(config: dict[str, Any], tokens: int) -> float:
    """Return which part of the weights a step of so many tokens reads: of experts only those that a token uses."""
    text: dict[str, Any] = config.get("text_config") or config
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not experts:
        return 1.0
    per_token = text.get("num_experts_per_tok") or text.get("experts_per_token") or 1
    width, inside = text["hidden_size"], text.get("moe_intermediate_size") or text["intermediate_size"]
    of_experts = text["num_hidden_layers"] * experts * 3 * width * inside
    words = 2 * text["vocab_size"] * width  # one table of them is looked up, the other multiplied
    of_layers = text["num_hidden_layers"] * 6 * width * width  # attention, roughly
    used = 1 - (1 - per_token / experts) ** tokens
    return float((of_experts * used + of_layers + words / 2) / (of_experts + of_layers + words))


if __name__ == "__main__":
    print(bandwidth())

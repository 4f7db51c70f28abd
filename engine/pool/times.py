"""How long each model took to load the last time, phase by phase, so that the next load can say how long it has yet.

Kept in one small JSON file. The first load of a process is told from later ones, which find libraries imported already.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.files import write_atomically

FILE_NAME = "load-times.json"

_log = logging.getLogger("hearth.load_times")


class LoadTimes:
    """By model and phase, the seconds from the beginning of the phase until the model was ready."""

    def __init__(self, data_dir: Path | None = None) -> None:
        """`data_dir` None: they are forgotten with the process."""
        self._file = None if data_dir is None else data_dir / FILE_NAME
        self._known = {} if self._file is None else _read(self._file)

    def remaining(self, model: str, phase: str, seconds_in_phase: float, *, again: bool) -> float | None:
        """Return the seconds that it should take yet; None where it was never seen in this phase."""
        known = self._known.get(_key(model, again=again), {}).get(phase)
        return None if known is None else max(0.0, known - seconds_in_phase)

    def keep(self, model: str, begun: Sequence[tuple[str, float]], ready: float, *, again: bool) -> None:
        """Keep a load: `begun` says when each phase began, `ready` when it was over, on one clock, in seconds."""
        took = {phase: round(ready - moment, 1) for phase, moment in reversed(begun)}
        self._known[_key(model, again=again)] = took
        if self._file is None:
            return
        try:
            write_atomically(self._file, json.dumps({"seconds_to_ready": self._known}, indent=1) + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s): the next start will not say how long it takes.", self._file, error)


def _key(model: str, *, again: bool) -> str:
    return f"{model} again" if again else model


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        kept: Mapping[str, Mapping[str, float]] = json.loads(file.read_text(encoding="utf-8"))["seconds_to_ready"]
        return {
            str(name): {str(phase): float(took) for phase, took in phases.items() if math.isfinite(took)}
            for name, phases in kept.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("%s cannot be read (%s): the next start will not say how long it takes.", file, error)
        return {}

"""The server of `bench cost`: `hearth serve` as it is, which counts the function calls of its event loop when told to.

Who tells it, and what becomes of the counts, is left to cost_targets.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from types import FrameType

COUNTS_VARIABLE = "BENCH_COUNTS_FILE"
SIGNAL = signal.SIGUSR1


class Counts(msgspec.Struct):
    """Calls since counting began: of Python functions (going on after an `await` is one, too) and of native ones."""

    python: int = 0
    native: int = 0
    signals: int = 0  # how many have come in all: whoever sent one waits for its number


class CallCounter:
    """Counts on the thread that takes signals, which is the event loop's. It costs nothing while it does not count."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._counts = Counts()

    def on_signal(self, *_: object) -> None:
        """Begin to count, or end it; either way write down what there is."""
        counted = sys.getprofile() is not None
        sys.setprofile(None)
        self._counts.signals += 1
        if not counted:
            self._counts.python = self._counts.native = 0
        unfinished = self._file.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(self._counts))
        unfinished.replace(self._file)  # nobody reads half of it
        if not counted:
            sys.setprofile(self._count)

    def _count(self, _: FrameType, event: str, __: Any) -> None:
        if event == "call":
            self._counts.python += 1
        elif event == "c_call":
            self._counts.native += 1


def main() -> None:
    """Be `hearth` with the same arguments."""
    from server.cli import main as hearth

    counter = CallCounter(Path(os.environ[COUNTS_VARIABLE]))
    signal.signal(SIGNAL, counter.on_signal)
    hearth()


if __name__ == "__main__":
    main()

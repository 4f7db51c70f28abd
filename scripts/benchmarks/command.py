"""What every benchmark's command does around its measuring: signals, errors, and where the JSON document goes."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from benchmarks.compare import say
from benchmarks.errors import BenchError
from benchmarks.report import save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Turn SIGTERM into Ctrl-C, so that servers and engines end too, and a `BenchError` into its words and status 1."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except BenchError as error:
        say(str(error))
        raise typer.Exit(1) from None


def deliver(report: bytes, output: Path | None, *, as_json: bool) -> bool:
    """Save and print the JSON document where that was asked for. Returns whether the tables are wanted instead."""
    if output is not None:
        save(report, output)
    if as_json:
        sys.stdout.buffer.write(report)
    return not as_json

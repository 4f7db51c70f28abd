"""The server's memory: what stays is kept from the garbage collector, what a burst took goes back to the system.

The modules and tables of vLLM, torch and our own are about a million objects. Looking through them over and over costs
every request, and halts all streams for a third of a second each time.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine import SETTLED

if TYPE_CHECKING:
    from engine import Engine
    from server.http.disconnect import Drain

_LOOK_SECONDS = 0.5
# Python's own are 700, 10, 10: with hundreds of streams the first is reached within one engine step.
_THRESHOLDS = (20_000, 20, 20)
# All that vLLM makes while it is imported stays: to look through it on the way would cost a second of the start.
_THRESHOLDS_AT_START = (1_000_000, 20, 20)
_START_SECONDS = 60.0
_TRIM_SECONDS = 10.0
_GROWN = 1.03


def collect_rarely() -> None:
    """Hardly look for garbage until `freeze_when_settled` is done. Before anything is loaded."""
    gc.set_threshold(*_THRESHOLDS_AT_START)


async def freeze_when_settled(engine: Engine) -> None:
    """Wait until every model is loaded, or has failed, for the first time; then take what lives out of all collections.

    Once only: what a later load leaves behind in cycles must be found, and few loads follow. So what comes with the
    first model that is loaded on demand, where none is at the start, is not covered.
    """
    # Weights may take an hour to load, beside models that answer and leave garbage.
    soon = asyncio.get_running_loop().call_later(_START_SECONDS, gc.set_threshold, *_THRESHOLDS)
    try:
        while not all(health.status in SETTLED for health in engine.health()):  # noqa: ASYNC110  # the one waiter for changes is the banner
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        soon.cancel()
        gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()


async def give_back_when_idle(drain: Drain) -> None:
    """Return what the C library keeps after a burst, at moments in which nothing runs. It keeps the peak by itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # not glibc
        return
    kept = 0
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        if not drain.running and _resident_bytes() > kept * _GROWN:
            if gc.get_freeze_count():  # quick, since what stays is frozen; before that it would halt everybody
                gc.collect()
            await asyncio.to_thread(trim, 0)
            kept = _resident_bytes()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

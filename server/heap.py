"""Keeps Python's cyclic garbage collector off what stays for good: the modules and tables of vLLM, torch and our own.

They are about a million objects. Looking through them over and over costs every request, and halts all streams for
a third of a second each time.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from engine import ANSWERS

if TYPE_CHECKING:
    from engine import Engine

_LOOK_SECONDS = 0.5
# Python's own are 700, 10, 10: with hundreds of streams the first is reached within one engine step.
_THRESHOLDS = (20_000, 20, 20)


async def freeze_when_settled(engine: Engine) -> None:
    """Wait until every model is loaded, or has failed, for the first time; then take what lives out of all collections.

    Once only: what a later load leaves behind in cycles must be found, and few loads follow.
    """
    gc.set_threshold(*_THRESHOLDS)
    while not all(health.status in ANSWERS | {"failed"} for health in engine.health()):  # noqa: ASYNC110  # the one waiter for changes is the banner
        await asyncio.sleep(_LOOK_SECONDS)
    gc.collect()
    gc.freeze()

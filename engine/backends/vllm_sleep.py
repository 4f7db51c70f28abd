"""vLLM's sleep mode, level 1: weights wait in RAM, the KV cache is let go, the process stays. GPUs only.

Whether a model sleeps is the plan's (engine/placement), when it does the pool's. Level 2 is not used: models have
woken from it without their weights (vLLM issue 29341).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.placement.hardware import read_hardware

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

_log = logging.getLogger("hearth.sleep")

_MOST_SECONDS = 120.0  # to carry weights over the bus; a sleeper that takes longer hangs
_ENOUGH = 0.8  # of what sleep should free: releases of vLLM have slept without freeing anything (vLLM issue 32714)


@dataclass(frozen=True, slots=True)
class Sleep:
    """How a model sleeps: which GPUs it leaves, by how many bytes each; `turn` is held while it takes them again."""

    gpus: tuple[int, ...]
    frees_bytes: int
    turn: Callable[[], AbstractAsyncContextManager[Any]]


async def fall_asleep(engine: Any, sleep: Sleep, name: str) -> bool:
    """Free its GPUs. False when that did not free what it must: the engine is of no more use then."""
    before = await _free_bytes(sleep.gpus)
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            await engine.sleep(level=1)
    except Exception:  # noqa: BLE001  # whatever vLLM can think of: it is ended instead
        _log.exception("%s did not fall asleep; it is ended and will be loaded anew", name)
        return False
    after = await _free_bytes(sleep.gpus)
    freed = min((after[gpu] - before[gpu] for gpu in sleep.gpus if gpu in after and gpu in before), default=0)
    if freed < _ENOUGH * sleep.frees_bytes:
        _log.warning("%s fell asleep and freed %d bytes of %d; it is ended instead", name, freed, sleep.frees_bytes)
        return False
    return True


async def wake_up(engine: Any, sleep: Sleep) -> None:
    """Take the GPUs again. Whatever is raised, the engine is of no more use."""
    async with sleep.turn(), asyncio.timeout(_MOST_SECONDS):
        await engine.wake_up()


async def _free_bytes(gpus: tuple[int, ...]) -> dict[int, int]:
    hardware = await asyncio.to_thread(read_hardware)
    return {gpu.index: gpu.free_bytes for gpu in hardware.gpus if gpu.index in gpus}

"""The only place that imports vllm, torch, diffusers, and that when a model loads: one folder per task."""

import asyncio
import logging
from typing import Protocol

from engine.admission import Admission

_log = logging.getLogger("hearth.backends")

WORKER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights come from folders, never from a hub at run time
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' too
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


class Backend(Protocol):
    """A loaded model, and what ours inherit. `died` is set once, the moment its process is gone, for good."""

    died: asyncio.Event
    admission: Admission

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, without those that they have started."""

    async def idle(self) -> None:
        """Return when no request runs or waits here any more."""
        await self.admission.idle()

    async def sleep(self) -> bool:
        """Free its memory and stay, to be woken. False where it cannot: then it is to be ended."""
        return False

    async def wake(self) -> None:
        """Answer again after a sleep. Whatever is raised, it is to be ended."""

    async def shutdown(self) -> None:
        """End it gracefully, within seconds."""

    def terminate(self) -> None:
        """End it now."""


async def end(backend: Backend) -> None:
    """End it; one that cannot even end must not keep its successor from starting."""
    try:
        await backend.shutdown()
    except Exception:  # noqa: BLE001  # whatever its libraries can think of
        _log.exception("an engine did not end as it should")

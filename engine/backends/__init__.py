"""The only place that imports vllm, torch, diffusers, and that when a model loads: one folder per task."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from engine.admission import Admission
from engine.stream import Stream

_T = TypeVar("_T")
_log = logging.getLogger("hearth.backends")

WORKER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights come from folders, never from a hub at run time
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' too
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


class Backend(Protocol):
    """A loaded model; the base of ours. `died` is set once, when its process is gone."""

    died: asyncio.Event
    admission: Admission

    @property
    def running(self) -> int:
        """How many sequences, images or texts it works on."""
        return self.admission.running

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, without those that they have started."""

    def start(self, stream: Stream[_T], make: Callable[[Stream[_T]], Coroutine[Any, Any, None]]) -> None:
        """Have `make` fill the stream, whether it is read or not; closing the stream cancels it."""
        making = asyncio.create_task(self._make(stream, make))

        def abort() -> asyncio.Future[None]:
            making.cancel()
            return making

        stream.abort = abort

    async def _make(self, stream: Stream[_T], make: Callable[[Stream[_T]], Coroutine[Any, Any, None]]) -> None:
        failure: Exception | None = None
        self.admission.begin_work()
        try:
            await make(stream)
        except Exception as error:  # noqa: BLE001  # raised where the stream is read
            failure = error
        finally:
            self.admission.end_work()
        stream.finish(failure)

    async def idle(self) -> None:
        """Return when no request runs or waits here any more."""
        await self.admission.idle()

    async def sleep(self) -> bool:
        """Free its memory and stay, to be woken. False: it cannot, and has to be ended."""
        return False

    async def wake(self) -> None:
        """Answer again after a sleep. If this raises, it has to be ended."""

    async def shutdown(self) -> None:
        """End it gracefully, within seconds."""

    def terminate(self) -> None:
        """End it now."""


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of these at the same time. An error in one ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end(backend: Backend) -> None:
    """End it; an error there must not keep its successor from starting."""
    try:
        await backend.shutdown()
    except Exception:  # noqa: BLE001  # libraries raise anything
        _log.exception("an engine did not end as it should")

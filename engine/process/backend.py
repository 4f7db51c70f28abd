"""What models in a worker process have in common: a queue in front, one life, a stream for each request.

What jobs are is their own (backends/diffusers, and the voices').
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from engine.admission import Admission, Room
from engine.errors import GenerationError, NotStartedError, engine_died
from engine.process.parent import WorkerProcess
from engine.process.watchdog import Patience
from engine.stream import Stream

_T = TypeVar("_T")
# A step of a tiny chat model must not wait for the rest: on a CPU the kernel lets chat go first.
_NICE_ON_CPU = 10


async def start_worker(  # noqa: PLR0913  # what a start depends on
    service: str,
    options: object,
    report: Callable[[str, float], None],
    *,
    threads: int,
    on_cpu: bool,
    stall_seconds: float | None,
) -> WorkerProcess:
    """Start a worker that loads `service`. Raises `LoadError` when that can never work."""
    return await WorkerProcess.start(
        service,
        options,
        report,
        environment={"OMP_NUM_THREADS": str(threads)},
        nice=_NICE_ON_CPU if on_cpu else 0,
        patience=Patience.of(stall_seconds, on_cpu=on_cpu),
    )


class WorkerBackend:
    """A loaded model in `worker`, thrown away whole: a restart makes a new one."""

    def __init__(self, worker: WorkerProcess, room: Room) -> None:
        self.worker = worker
        self.died = worker.died
        self.admission = Admission(room)
        self._watch = asyncio.create_task(self._watch_worker())

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.worker.pid,)

    async def idle(self) -> None:
        await self.admission.idle()

    async def sleep(self) -> bool:
        """Memory comes back by ending the process."""
        return False

    async def wake(self) -> None:
        """It never sleeps."""

    async def shutdown(self) -> None:
        self._watch.cancel()
        await self.worker.shutdown()

    def terminate(self) -> None:
        self._watch.cancel()
        self.worker.terminate()

    def start(self, stream: Stream[_T], make: Callable[[Stream[_T]], Coroutine[Any, Any, None]]) -> None:
        """Have `make` fill the stream. It goes on at its own pace, read or not; closing the stream cancels it."""
        making = asyncio.create_task(self._make(stream, make))

        def abort() -> asyncio.Future[None]:
            making.cancel()
            return making

        stream.abort = abort

    async def run(
        self, job: msgspec.Struct, take: Callable[[msgspec.Raw], None], *, within_seconds: float, advice: str
    ) -> None:
        """Run a job (`WorkerProcess.run`). Raises `GenerationError`, whose words end with `advice`, after so long."""
        try:
            async with asyncio.timeout(within_seconds):
                await self.worker.run(job, take)
        except TimeoutError as error:
            raise GenerationError(f"It took longer than {within_seconds:g} s and was given up. {advice}") from error

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

    async def _watch_worker(self) -> None:
        await self.worker.died.wait()
        self.admission.close(lambda: engine_died(NotStartedError))

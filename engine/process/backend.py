"""What models in a worker process have in common: a queue in front, and one life. What jobs are is their own."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from engine.admission import Admission, Room
from engine.errors import GenerationError, NotStartedError, engine_died
from engine.process.parent import WorkerProcess
from engine.process.watchdog import Patience

_T = TypeVar("_T")
# A step of a tiny chat model must not wait for the rest: on a CPU the kernel lets chat go first.
_NICE_ON_CPU = 10


async def start_worker(  # noqa: PLR0913  # what a start depends on
    service: str,
    options: msgspec.Struct,
    report: Callable[[str, float], None],
    *,
    threads: int,
    on_cpu: bool,
    stall_seconds: float | None,
) -> WorkerProcess:
    """Start a worker that loads `service`. Raises `LoadError` when that can never work."""
    return await WorkerProcess.start(
        service,
        msgspec.msgpack.encode(options),
        report,
        environment={"OMP_NUM_THREADS": str(threads)},
        nice=_NICE_ON_CPU if on_cpu else 0,
        patience=Patience.of(stall_seconds, on_cpu=on_cpu),
    )


class InWorker:
    """A loaded model in `worker`, thrown away whole: a restart makes a new one."""

    def __init__(self, worker: WorkerProcess, room: Room) -> None:
        self.worker = worker
        self.died = worker.died
        self.admission = Admission(room)
        self._watch = asyncio.create_task(self._watch_worker())

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""
        return (self.worker.pid,)

    async def idle(self) -> None:
        """Return when no request runs or waits here any more."""
        await self.admission.idle()

    async def sleep(self) -> bool:
        """Memory comes back by ending the process."""
        return False

    async def wake(self) -> None:
        """It never sleeps."""

    async def shutdown(self) -> None:
        """End the worker; whatever still runs fails."""
        self._watch.cancel()
        await self.worker.shutdown()

    def terminate(self) -> None:
        """End the worker at once."""
        self._watch.cancel()
        self.worker.terminate()

    async def delivered(
        self, box: "Outbox[_T]", works: Iterable[Callable[[], Coroutine[Any, Any, None]]]
    ) -> AsyncGenerator[_T, None]:
        """Run `works` side by side and yield what they put into `box`, until all have ended.

        They go on whether anybody reads or not. The first error ends all of them, and so does closing the generator.
        """
        tasks = [asyncio.create_task(self._run(box, work)) for work in works]
        try:
            running = len(tasks)
            while running:
                item = await box.get()
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, box: "Outbox[_T]", work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            self.admission.begin_work()
            try:
                await work()
            finally:
                self.admission.end_work()
            box.end()
        except Exception as error:  # noqa: BLE001  # whoever reads the box raises it
            box.end(error)

    async def _watch_worker(self) -> None:
        await self.worker.died.wait()
        self.admission.close(lambda: engine_died(NotStartedError))


async def given_up_after(
    seconds: float, frames: AsyncGenerator[bytes, None], advice: str
) -> AsyncGenerator[bytes, None]:
    """Yield `frames`, and close them. Raises `GenerationError`, whose words end with `advice`, after so long.

    The clock is asked frame by frame: whoever reads them may do so from several tasks.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    async with contextlib.aclosing(frames):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    frame = await anext(frames)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise GenerationError(f"It took longer than {seconds:g} s and was given up. {advice}") from error
            yield frame


T = TypeVar("T")


class Outbox(Generic[T]):
    """From one task to one reader. A reader that does not read holds up nobody: past the bound the job fails."""

    def __init__(self, most_bytes: int) -> None:
        self._queue: asyncio.Queue[tuple[T | BaseException | None, int]] = asyncio.Queue()
        self._most_bytes = most_bytes
        self._bytes = 0

    def put(self, item: T, size_bytes: int) -> None:
        """Add something. Raises `GenerationError` when too much lies here."""
        self._bytes += size_bytes
        if self._bytes > self._most_bytes:
            raise GenerationError("The answer was not read for too long and was given up. Read it while it comes.")
        self._queue.put_nowait((item, size_bytes))

    def end(self, error: BaseException | None = None) -> None:
        """Nothing follows; the reader gets `error`."""
        self._queue.put_nowait((error, 0))

    async def get(self) -> T | None:
        """Return what comes next, None at the end. Raises what it ended with."""
        item, size_bytes = await self._queue.get()
        self._bytes -= size_bytes
        if isinstance(item, BaseException):
            raise item
        return item

"""The text of `/metrics`: what was counted, what vLLM counted, and how things stand at this moment."""

from __future__ import annotations

import asyncio
import shutil
from itertools import chain
from typing import TYPE_CHECKING, get_args

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.placement.hardware import read_hardware
from engine.types import ModelStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence

    from engine import Engine
    from server.drain import Drain
    from server.settings import Settings


# OpenMetrics, which Prometheus would rather have, writes the colon of vLLM's names as something else.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
KEPT_SECONDS = 1.0


class KeptPage:
    """The page as it was last made, for a second: to make it takes the CPU time of some 25 requests (12 ms).

    Whoever asks meanwhile, also while it is being made, gets the same. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._making: asyncio.Task[bytes] | None = None
        self._made_at = 0.0

    async def read(self, make: Callable[[], Coroutine[None, None, bytes]]) -> bytes:
        """Return the page, from `make` if there is none that is young enough. Raises what `make` does."""
        if self._making is None or (self._making.done() and self._is_old(self._making)):
            self._making = asyncio.create_task(self._made(make))
        return await asyncio.shield(self._making)  # one client that leaves takes it from nobody else

    def _is_old(self, made: asyncio.Task[bytes]) -> bool:
        failed = made.cancelled() or made.exception() is not None
        return failed or asyncio.get_running_loop().time() - self._made_at >= KEPT_SECONDS

    async def _made(self, make: Callable[[], Coroutine[None, None, bytes]]) -> bytes:
        text = await make()
        self._made_at = asyncio.get_running_loop().time()
        return text


def page(collectors: Sequence[Collector], now: Iterable[Metric]) -> bytes:
    """Blocking, some 20 ms. Return the text: `now`, and all that the collectors hold."""
    return generate_latest(_Merged(chain(now, *(collector.collect() for collector in collectors))))


class _Merged(Collector):
    """Families of one name, each model's vLLM having its own, stand together as the format wants it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            kept = self._families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            # When a counter was made is told by hundreds of lines that nobody asks for
            kept.samples += [sample for sample in family.samples if not sample.name.endswith("_created")]

    def collect(self) -> Iterator[Metric]:
        """Yield each family once."""
        yield from self._families.values()


def standing(engine: Engine, drain: Drain) -> list[Metric]:
    """Tell how models and queues stand. On the event loop, whose they are; the rest may go elsewhere."""
    states = GaugeMetricFamily("hearth_model_state", "1 for the state that a model is in.", labels=["model", "state"])
    restarts = CounterMetricFamily("hearth_model_restarts", "Times a model's process died.", labels=["model"])
    for health in engine.health():
        for state in get_args(ModelStatus):
            states.add_metric([health.id, state], float(state == health.status))
        restarts.add_metric([health.id], health.restarts)
    swaps = CounterMetricFamily("hearth_model_swaps", "Times a model made room for another.", value=engine.swaps)
    running = GaugeMetricFamily("hearth_queue_running", "Answers, images or texts at work.", labels=["model"])
    waiting = GaugeMetricFamily("hearth_queue_waiting", "Requests that wait for their turn.", labels=["model"])
    for load in engine.loads():
        running.add_metric([load.id], load.running)
        waiting.add_metric([load.id], load.waiting)
    requests = GaugeMetricFamily("hearth_requests_running", "HTTP requests being answered.", value=drain.running)
    draining = GaugeMetricFamily("hearth_draining", "1 while the server is ending.", value=float(drain.draining))
    return [states, restarts, swaps, running, waiting, requests, draining]


def machine(settings: Settings) -> list[Metric]:
    """Tell what GPUs and disks have left. Blocking, some 50 ms."""
    labels = ["gpu", "name"]
    total = GaugeMetricFamily("hearth_gpu_memory_total_bytes", "Memory of a GPU.", labels=labels)
    used = GaugeMetricFamily("hearth_gpu_memory_used_bytes", "What is taken of it, by anybody.", labels=labels)
    for gpu in read_hardware().gpus:
        total.add_metric([str(gpu.index), gpu.name], gpu.total_bytes)
        used.add_metric([str(gpu.index), gpu.name], gpu.total_bytes - gpu.free_bytes)
    size = GaugeMetricFamily("hearth_disk_size_bytes", "The file system of a folder.", labels=["folder"])
    free = GaugeMetricFamily("hearth_disk_free_bytes", "What is left on it.", labels=["folder"])
    for name, folder in {"data": settings.data_dir, "weights": settings.weights_dir}.items():
        if folder.is_dir():
            disk = shutil.disk_usage(folder)
            size.add_metric([name], disk.total)
            free.add_metric([name], disk.free)
    return [total, used, size, free]

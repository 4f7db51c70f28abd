"""Starts the vLLM engine of a chat model, and puts it to sleep (its plan says whether, the pool when) and wakes it."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.backends.vllm import compat, processes
from engine.config import ChatModelSpec
from engine.media import Pictures
from engine.placement.hardware import read_hardware

_log = logging.getLogger("hearth.sleep")

_SLEEP_TIMEOUT_SECONDS = 120.0  # weights are copied over the bus; what takes longer hangs
_LEAST_FREED = 0.8  # of what sleep should free: releases of vLLM have slept without freeing anything (vLLM issue 32714)


@dataclass(frozen=True, slots=True)
class Launch:
    """What `VllmChat` needs to start: the model's entry, its folder, the threads of blocking starts, the pictures."""

    spec: ChatModelSpec
    weights: Path
    starter: processes.StarterThread
    grammar_starter: processes.StarterThread
    pictures: Pictures
    report: Callable[[str, float], None]
    metrics: CollectorRegistry | None = None
    """For vLLM's own metrics; None: it has none."""
    sleep: Sleep | None = None
    """How it frees its GPUs for another model; None: by its end."""
    compiled: bool = True
    """False: it starts sooner and answers slower."""
    only_kept_code: bool = False
    """Compiled, but it fails where that would have to be done now."""


def start_engine(launch: Launch) -> Any:
    """Blocking, 4 to 40 s. Returns the `AsyncLLM` when its core is ready."""
    launch.report("importing vLLM", 0.1)
    compat.check(launch.spec.id)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    stat_logger = None if launch.metrics is None else compat.apply("metrics", lambda: stat_logger_into(launch.metrics))
    with processes.changing_environment():
        with processes.CONFIG_LOCK:
            launch.report("reading the model's configuration", 0.4)
            arguments = AsyncEngineArgs(**_engine_arguments(launch))
            config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            processes.start_own_processes()
        launch.report(f"starting the engine process{', compiled' if launch.compiled else ''}", 0.5)
        processes.job.may_compile = not launch.only_kept_code
        return AsyncLLM.from_vllm_config(
            vllm_config=config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=False,
            disable_log_stats=stat_logger is None,
            stat_loggers=None if stat_logger is None else [stat_logger],
        )


def stat_logger_into(registry: CollectorRegistry | None) -> type[Any]:
    """Return vLLM's logger of its own metrics, which writes into `registry` and ends with it.

    By itself vLLM registers them for the whole process, and drops those of other engines when it does.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.perf import PerfMetricsProm
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    def ours(theirs: type[Any], **names: Any) -> type[Any]:
        return type(theirs.__name__, (theirs,), names)

    # Static: Python 3.14 binds a `partial` to the object, like a method
    counter, gauge, histogram = (staticmethod(partial(each, registry=registry)) for each in (Counter, Gauge, Histogram))
    logger = ours(
        PrometheusStatLogger,
        _gauge_cls=gauge,
        _counter_cls=counter,
        _histogram_cls=histogram,
        _spec_decoding_cls=ours(SpecDecodingProm, _counter_cls=counter),
        _perf_metrics_cls=ours(PerfMetricsProm, _counter_cls=counter),
    )
    if compat.fits("latencies"):
        logger.record = _record_latencies_at_once(logger.record)
    return logger


def _record_latencies_at_once(record: Callable[..., None]) -> Callable[..., None]:
    """Sort the times between tokens into their buckets step by step: token by token was a tenth of all API time."""

    def recorded(
        logger: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if iteration_stats is not None:
            seconds, iteration_stats.inter_token_latencies_iter = iteration_stats.inter_token_latencies_iter, []
            histogram = logger.histogram_inter_token_latency[engine_idx]
            places = Count(bisect_left(histogram._upper_bounds, each) for each in seconds)  # noqa: SLF001
            for place, tokens in places.items():
                histogram._buckets[place].inc(tokens)  # noqa: SLF001
            histogram._sum.inc(sum(seconds))  # noqa: SLF001
        record(logger, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return recorded


def _kernels() -> dict[str, list[str]]:
    from engine.backends.vllm.kernels import kernel_priority, register_kernels

    register_kernels()
    return kernel_priority()


def _engine_arguments(launch: Launch) -> dict[str, Any]:
    spec, engine = launch.spec, launch.spec.engine
    images = engine.max_images if "vision" in spec.capabilities else 0
    arguments: dict[str, Any] = {
        "model": str(launch.weights.resolve()),  # what it compiles is found by this name again
        "served_model_name": [spec.id],
        "load_format": "safetensors",
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "dtype": engine.dtype,
        "max_model_len": engine.context_length,
        "max_num_seqs": engine.max_num_seqs,
        "max_logprobs": 20,
        "scheduling_policy": "priority",
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": not launch.compiled,
        # Whatever else a model could take (video, sound) is never sent, so no memory is kept for it.
        "limit_mm_per_prompt": {"image": images, "video": 0, "audio": 0},
        # Its two halves must see every picture in the same order, and admission here changes the order.
        "mm_processor_cache_gb": 0,
        "enable_sleep_mode": launch.sleep is not None,
    }
    cache_gib = engine.kv_cache_gib
    if processes.runs_on_cpu():
        # By class path: the short name "uni" is turned into a process of its own on a CPU.
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        cache_gib = cache_gib or 1.0
        kernels = None if launch.compiled else compat.apply("cpu kernels", _kernels)
        if kernels is not None:
            arguments["ir_op_priority"] = kernels
    if cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    return arguments


@dataclass(frozen=True, slots=True)
class Sleep:
    """How a model sleeps: which GPUs it frees, and how many bytes of each. `turn` is entered while it wakes.

    vLLM's level 1: weights move to RAM, the KV cache is dropped, the process stays. Level 2 is not used: models have
    woken from it without their weights (vLLM issue 29341).
    """

    gpus: tuple[int, ...]
    frees_bytes: int
    turn: AbstractAsyncContextManager[Any]


async def fall_asleep(engine: Any, sleep: Sleep, name: str) -> bool:
    """Free its GPUs. False where that freed too little: the engine cannot be used after that."""
    before = await _free_bytes(sleep.gpus)
    try:
        async with asyncio.timeout(_SLEEP_TIMEOUT_SECONDS):
            await engine.sleep(level=1)
    except Exception:  # noqa: BLE001  # any error of vLLM: the engine is ended instead
        _log.exception("%s did not fall asleep; it is ended and will be loaded again", name)
        return False
    after = await _free_bytes(sleep.gpus)
    freed = min((after[gpu] - before[gpu] for gpu in sleep.gpus if gpu in after and gpu in before), default=0)
    if freed < _LEAST_FREED * sleep.frees_bytes:
        _log.warning("%s fell asleep and freed %d bytes of %d; it is ended instead", name, freed, sleep.frees_bytes)
        return False
    return True


async def wake_up(engine: Any, sleep: Sleep) -> None:
    """Take the GPUs again. After any exception the engine cannot be used."""
    async with sleep.turn, asyncio.timeout(_SLEEP_TIMEOUT_SECONDS):
        await engine.wake_up()


async def _free_bytes(gpus: tuple[int, ...]) -> dict[int, int]:
    hardware = await asyncio.to_thread(read_hardware)
    return {gpu.index: gpu.free_bytes for gpu in hardware.gpus if gpu.index in gpus}

"""Runs in every process of an engine: ties it to the server, and corrects faults of vLLM and torch there.

vLLM calls `register` through the entry point `vllm.general_plugins`. Each patch is optional (compat.py); its docstring
says which fault it corrects, in any model. No `from __future__ import annotations`: vLLM reads the types of the norms.
"""

import gc
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.admission import BACKGROUND_PRIORITY, BACKGROUND_QUIET_SECONDS, BATCH_PRIORITY, SEQUENCE, beside_interactive
from engine.backends.vllm.compat import apply
from engine.backends.vllm.grammars import ENGINE_THREADS
from engine.backends.vllm.processes import end_phases, runs_on_cpu, tell_phase, tie_to_parent

# Python's own are 700, 10, 10, which a step of 128 requests reaches several times: a twentieth of an engine's time.
_GC_THRESHOLDS = (20_000, 20, 20)
_PROVIDER = "hearth_cpu"
_NORM_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_NORM_WIDTH = 32  # the most numbers that a kernel takes at once; rows must be multiples of what it takes
_BACKGROUND_PROMPT_TOKENS = 256  # of a step beside interactive ones; a GPU computes them while it reads weights
# vLLM's engine argument `ir_op_priority`. Where a kernel does not fit, vLLM's is used.
_NORMS = {"rms_norm": [_PROVIDER], "fused_add_rms_norm": [_PROVIDER]}


def register() -> None:
    """Called once by vLLM in each of its processes; the one that serves HTTP only registers the kernels."""
    if runs_on_cpu():
        apply("cpu kernels", register_kernels)
    else:
        apply("flashinfer", hide_flashinfer)
    if multiprocessing.parent_process() is None:
        return
    tie_to_parent()
    gc.set_threshold(*_GC_THRESHOLDS)
    for name, change in patches().items():
        apply(name, change)


def register_kernels() -> dict[str, list[str]]:
    """Have norms use kernels of vLLM's wheel that vLLM (0.32) does not use on a CPU, where models run uncompiled.

    Gain: 28 % more requests/s at 32 streams of the demo model; at most 1.6 % of a layer of 1.7 B parameters. One call
    replaces seven of torch; the last digits differ. Needed in each process that reads vLLM's configuration. Safe to
    call twice. Returns vLLM's engine argument `ir_op_priority`.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    if _PROVIDER not in ir.ops.rms_norm.impls:
        current_platform.import_kernels()
        built = all(hasattr(torch.ops._C, name) for name in _NORMS)  # noqa: SLF001  # vLLM's own namespace
        ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_norm_fits, supported=built)(_rms_norm)
        added = ir.ops.fused_add_rms_norm
        added.register_impl(_PROVIDER, supports_args=_norm_fits_added, supported=built, inplace=True)(
            _fused_add_rms_norm
        )
    return _NORMS


def hide_flashinfer() -> None:
    """Without nvcc, have vLLM take other kernels: FlashInfer can be imported, and ends the engine later."""
    from vllm.utils.flashinfer import has_flashinfer

    if not has_flashinfer():
        sys.modules["flashinfer"] = None  # type: ignore[assignment]  # from now on its import fails


def patches() -> dict[str, Callable[[], None]]:
    """Return the patches of an engine process, by their names in compat.py."""
    schedule = "vllm.v1.core.sched.scheduler.Scheduler.schedule"
    allocate = "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots"
    executor = "vllm.v1.executor.abstract.Executor"
    runner = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    wrappers: dict[str, dict[str, Callable[..., Any]]] = {
        "grammar threads": {"vllm.v1.structured_output.StructuredOutputManager.__init__": _add_grammar_threads},
        "dumps": {"vllm.v1.engine.core.dump_engine_exception": _dump_nothing},
        "newcomers": {allocate: _note_who_got_no_blocks, schedule: _schedule_with_blocks_for_newcomers},
        "phases": {
            f"{executor}.__init__": _read_weights,
            "vllm.v1.engine.core.EngineCore._initialize_kv_caches": _make_cache,
            f"{executor}.compile_or_warm_up_model": _warm_up,
        },
        "shared steps": {schedule: _schedule_beside_prompts},
        "interactive first": {allocate: _allocate_from_paused, schedule: _schedule_without_paused},
    }
    if runs_on_cpu():
        wrappers |= {
            "seeds": {f"{runner}.sample_tokens": _sample_discarded_tokens_unseeded},
            "cache at start": {f"{runner}.initialize_kv_cache_tensors": _commit_kv_cache_at_start},
            "compile models only": {
                "vllm.compilation.wrapper.TorchCompileWithNoGuardsWrapper.__init__": _compile_only_models
            },
            "load compiled code": {"torch.compiler.load_compiled_function": _load_compiled_model},
        }
    return {"amx": _init_amx, **{name: partial(_wrap_all, each) for name, each in wrappers.items()}}


def _wrap_all(wrappers: dict[str, Callable[..., Any]]) -> None:
    """Replace methods and functions by wrappers, which get the original as first argument."""
    for dotted, wrapper in wrappers.items():
        _wrap(dotted, wrapper)


def _wrap(dotted: str, wrapper: Callable[..., Any]) -> None:
    place, _, name = dotted.rpartition(".")
    owner = pkgutil.resolve_name(place)
    inherited = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        return wrapper(inherited, *arguments, **named)

    setattr(owner, name, wrapped)


def _init_amx() -> None:
    """Ask the kernel for the AMX tiles: without it a very short first prompt ends in SIGILL on such CPUs."""
    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  # no public name for it
        torch.cpu._init_amx()  # noqa: SLF001


def _dump_nothing(*_: Any) -> None:
    """After a failed step vLLM would log what its requests hold: schemas, stop texts, tokens that it guessed."""


def _add_grammar_threads(construct: Callable[..., None], manager: Any, *arguments: Any, **named: Any) -> None:
    """Have enough threads for grammars: vLLM has half as many as cores, and slow grammars could take all of them."""
    construct(manager, *arguments, **named)
    if hasattr(manager, "executor"):
        manager.executor.shutdown()  # still idle
        manager.executor = ThreadPoolExecutor(ENGINE_THREADS)


def _read_weights(construct: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """A start did not say what it did for minutes, while a large model was read, compiled and tried out."""
    tell_phase("reading the weights", 0.55)
    construct(*arguments, **named)


def _make_cache(initialize: Callable[..., Any], core: Any, config: Any) -> Any:
    # On a GPU a model is compiled here, by the trial that measures it; on a CPU in the warm-up.
    compiles = not config.model_config.enforce_eager and not runs_on_cpu()
    tell_phase("compiling it, and measuring its memory" if compiles else "measuring the memory that it needs", 0.7)
    return initialize(core, config)


def _warm_up(warm_up: Callable[..., Any], executor: Any) -> Any:
    if executor.vllm_config.model_config.enforce_eager:
        phase = "warming up"
    else:
        phase = "compiling, and warming up" if runs_on_cpu() else "capturing CUDA graphs"
    tell_phase(phase, 0.85)
    warmed_up = warm_up(executor)
    end_phases()
    return warmed_up


def _note_who_got_no_blocks(allocate: Callable[..., Any], manager: Any, request: Any, *rest: Any, **named: Any) -> Any:
    blocks = allocate(manager, request, *rest, **named)
    if blocks is None and not _is_put_off(manager, **named):
        manager.got_no_blocks = request
    return blocks


def _is_put_off(manager: Any, *, new_computed_blocks: Any = None, **_: Any) -> bool:
    """Whether it does not need blocks now: another request computes its prefix in this step (layers with states)."""
    managers = manager.coordinator.single_type_managers
    return any(
        blocks and blocks[-1].block_hash in getattr(one, "cached_blocks_this_step", ())
        for one, blocks in zip(managers, new_computed_blocks.blocks if new_computed_blocks else (), strict=False)
    )


def _schedule_with_blocks_for_newcomers(schedule: Callable[..., Any], scheduler: Any, *rest: Any, **named: Any) -> Any:
    """A newcomer waited seconds for one block of a full KV cache, until an answer of somebody with hundreds grew.

    vLLM (0.32) preempts nothing for a waiting request. If the first of them got no blocks in the last step, the
    sequence that vLLM would preempt is preempted, if its owner has more than twice as many: one per step.
    """
    manager = scheduler.kv_cache_manager
    waiting, manager.got_no_blocks = getattr(manager, "got_no_blocks", None), None
    if waiting is not None and scheduler.running and scheduler.waiting and scheduler.waiting.peek_request() is waiting:
        last = _next_victim(scheduler.running)
        if last.priority // SEQUENCE > 2 * (waiting.priority // SEQUENCE):
            _preempt(scheduler, scheduler.running, last)
    return schedule(scheduler, *rest, **named)


def _next_victim(running: list[Any]) -> Any:
    """Return the request that vLLM would preempt."""
    return max(running, key=lambda request: (request.priority, request.arrival_time))


def _preempt(scheduler: Any, running: list[Any], request: Any) -> None:
    running.remove(request)
    scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001  # no public name for it


def _schedule_beside_prompts(schedule: Callable[..., Any], scheduler: Any, *rest: Any, **named: Any) -> Any:
    """A short question waited for seconds, until an earlier long prompt was read to its end.

    vLLM (0.32) gives a step to its requests in the order in which they began. Here answers have their tokens first.
    Prompts share the rest equally, while a request waits that does not come after all of them; it gets a share too.
    """
    reading = [request for request in scheduler.running if request.is_prefill_chunk]
    if not reading:
        return schedule(scheduler, *rest, **named)
    scheduler.running.sort(key=lambda request: request.is_prefill_chunk)
    alone = not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_running_reqs
    if alone or scheduler.waiting.peek_request().priority > max(request.priority for request in reading):
        return schedule(scheduler, *rest, **named)
    left = scheduler.max_num_scheduled_tokens - len(scheduler.running)
    with _prompts_in_parts(scheduler.scheduler_config, left // (len(reading) + 1) or 1):
        return schedule(scheduler, *rest, **named)


@contextmanager
def _prompts_in_parts(limits: Any, tokens: int) -> Iterator[None]:
    """Read at most so many tokens of each prompt in a step."""
    before, limits.long_prefill_token_threshold = limits.long_prefill_token_threshold, tokens
    try:
        yield
    finally:
        limits.long_prefill_token_threshold = before


def _schedule_without_paused(schedule: Callable[..., Any], scheduler: Any, *rest: Any, **named: Any) -> Any:
    """A question beside a batch of 256 lines had their long steps until the last line had ended.

    vLLM (0.32) makes a token for every running sequence in every step. Here most background sequences get none while
    there are interactive requests, and for some time after. They keep their blocks while nobody else needs them. Their
    prompts are read one at a time, in small parts, and only while no other prompt is read. One with a picture is read
    to its end: others wait for its place in the cache of encoded pictures.
    """
    running, waiting, most = scheduler.running, scheduler.waiting, scheduler.max_num_running_reqs
    if _is_quiet(scheduler):
        return schedule(scheduler, *rest, **named)
    kept = [request for request in running if request.priority < BACKGROUND_PRIORITY]
    queued = [request for request in waiting if request.priority >= BACKGROUND_PRIORITY]
    others = len(waiting) - len(queued)
    if len(running) + others > most:  # paused ones keep their places: leave it to vLLM until some have ended
        return schedule(scheduler, *rest, **named)
    reads = others > 0 or any(request.is_prefill_chunk for request in kept)
    step = nullcontext() if reads else _small_parts(scheduler)
    paused, room = _Paused(scheduler), beside_interactive(most)
    for request in running:
        if request.priority < BACKGROUND_PRIORITY:
            continue
        begun_picture = request.is_prefill_chunk and request.has_encoder_inputs
        if begun_picture or (room > 0 and not (reads and request.is_prefill_chunk)):
            kept.append(request)
            reads, room = reads or request.is_prefill_chunk, room - 1
        else:
            paused.running.append(request)
    paused.waiting = queued if reads or room <= 0 else queued[1:]
    scheduler.running, scheduler.kv_cache_manager.paused = kept, paused
    waiting.remove_requests(paused.waiting)
    with step:
        done = schedule(scheduler, *rest, **named)
    waiting.prepend_requests(paused.waiting)
    scheduler.running += paused.running
    scheduler.kv_cache_manager.paused = None
    return done


@contextmanager
def _small_parts(scheduler: Any) -> Iterator[None]:
    """Read a small part of a prompt in a step, if vLLM is set to read prompts in parts."""
    limits, most = scheduler.scheduler_config, scheduler.max_num_scheduled_tokens
    if not limits.enable_chunked_prefill:
        yield
        return
    if len(scheduler.running) + len(scheduler.waiting) == 1:  # vLLM has no threshold for a lone request
        scheduler.max_num_scheduled_tokens = min(most, _BACKGROUND_PROMPT_TOKENS)
    with _prompts_in_parts(limits, min(limits.long_prefill_token_threshold or most, _BACKGROUND_PROMPT_TOKENS)):
        yield
    scheduler.max_num_scheduled_tokens = most


def _is_quiet(scheduler: Any) -> bool:
    """Whether there is no interactive request, and was none lately. Stores on the scheduler until when to wait."""
    waiting, now = scheduler.waiting, time.monotonic()
    first = waiting.peek_request().priority if waiting else BATCH_PRIORITY
    if first < BATCH_PRIORITY or any(request.priority < BATCH_PRIORITY for request in scheduler.running):
        scheduler.quiet_at = now + BACKGROUND_QUIET_SECONDS
    return bool(now >= getattr(scheduler, "quiet_at", now))


@dataclass(slots=True)
class _Paused:
    """The requests that a step leaves out, by where they were."""

    scheduler: Any
    running: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)

    def preempt(self) -> None:
        """Preempt one of those that ran, the one that vLLM would. This step leaves it out in any case."""
        last = _next_victim(self.running)
        _preempt(self.scheduler, self.running, last)
        self.scheduler.waiting.remove_requests([last])
        self.waiting.append(last)


def _allocate_from_paused(allocate: Callable[..., Any], manager: Any, *rest: Any, **named: Any) -> Any:
    """If there are too few blocks, take those of paused sequences, which vLLM does not see."""
    while (blocks := allocate(manager, *rest, **named)) is None:
        paused = getattr(manager, "paused", None)
        if paused is None or not paused.running or _is_put_off(manager, **named):
            return None
        paused.preempt()
    return blocks


def _sample_discarded_tokens_unseeded(sample: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """A request with a `seed` ended the engine if its prompt took several steps.

    vLLM (0.32) samples a token in each of these steps, discards it, and sets the request's generator back, which is
    not possible on a CPU. Here discarded tokens are sampled without that generator.
    """
    batch = runner.input_batch
    discarded = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
    generators = {row: batch.generators.pop(row) for row in map(int, discarded) if row in batch.generators}
    try:
        return sample(runner, *arguments, **named)
    finally:
        batch.generators.update(generators)


def _commit_kv_cache_at_start(initialize: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The KV cache took its memory page by page, in its first busy hours.

    Linux allocates zeroed memory at the first write, so memory that the plan gave to others would run out under load
    and not at the start. Here all of the cache is written to once, 0.3 s per GiB.
    """
    caches = initialize(*arguments, **named)
    # Layers share buffers; some refer to a whole one.
    buffers = {cache.untyped_storage().data_ptr(): cache for cache in caches.values()}
    for cache in buffers.values():
        whole = cache.new_empty(0, dtype=torch.uint8)
        whole.set_(cache.untyped_storage()).zero_()
    return caches


def _compile_only_models(construct: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Torch's compiler took 10 s at the first use of single functions, while all requests waited.

    So it is off (processes.py); this turns it on while a whole model is compiled.
    """
    # torch reads it when a function is given to its compiler
    before = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    try:
        construct(*arguments, **named)
    finally:
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def _load_compiled_model(load: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Each start compiled a model again (10 s and more), since vLLM could not load what it had kept.

    vLLM (0.32) calls a method of the loaded code that only code for a GPU has.
    """
    loaded = load(*arguments, **named)
    compiled = loaded._artifacts.compiled_fn  # noqa: SLF001  # as vLLM does
    if not hasattr(compiled, "finalize_loading"):
        compiled.finalize_loading = lambda _config: None  # nothing is left to load
    return loaded


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    rows = x.contiguous()  # heads that are cut out of one projection are not contiguous, and the kernel does not check
    output = torch.empty_like(rows)
    torch.ops._C.rms_norm(output, rows, weight, epsilon)  # noqa: SLF001
    return output


def _norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    if variance_size is not None or x.shape[-1] % _NORM_WIDTH or x.dtype not in _NORM_DTYPES:
        return False
    return weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous())


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)  # noqa: SLF001
    return x, x_residual


def _norm_fits_added(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _norm_fits(x, weight, epsilon, variance_size)

"""Keeps seeded requests from killing an engine on a CPU, in the process that computes. On a GPU vLLM is right itself.

While a long prompt is computed in several steps, vLLM samples a token in each and throws it away, and winds the
request's random numbers back after that. A CPU's generator cannot be wound back (vLLM 0.32): the engine would end.

Makes an engine on a CPU take its KV cache when it is loaded, as on a GPU, and not page by page while it serves.

Linux hands out zeroed memory on the first write to it. An engine would grow by its whole cache in its first busy hours:
what a plan has promised to others would be found missing under load, not at the start.

Compiled models on a CPU: has vLLM load at a start what it compiled at an earlier one, and compile nothing else.

Runs in the engine's process.

Spares vLLM's scheduler the search for memory that a request has already, in the process that schedules.

At each step vLLM (0.32) goes through all of finding, taking and keeping blocks of the KV cache for each running
request, though one more token nearly always fits into the last block: a fifteenth of a step of 128 requests.

Kernels of vLLM's build for CPUs that it does not use there: norms, where a model runs uncompiled.

vLLM (0.32) leaves norms on a CPU to torch's compiler. Uncompiled, each is seven calls of torch, and all of them were a
seventh of a step of a small model. A kernel does the same in one call; it rounds elsewhere, so last digits differ.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor


def spare_seeds() -> None:
    """Draw what is thrown away from nobody's seed, so that nothing has to be wound back. Safe to call twice."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "sample_tokens" not in vars(CPUModelRunner):
        CPUModelRunner.sample_tokens = _sampling(CPUModelRunner.sample_tokens)


def _sampling(sample_tokens: Any) -> Any:
    def sample(runner: Any, *arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        unfinished = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs])
        put_aside = {place: batch.generators.pop(place) for place in map(int, unfinished) if place in batch.generators}
        try:
            return sample_tokens(runner, *arguments, **named)
        finally:
            batch.generators.update(put_aside)

    return sample


def take_cache_at_start() -> None:
    """Have vLLM's runner write to all of the cache once (0.3 s a GiB). Safe to call twice."""
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "initialize_kv_cache_tensors" in vars(CPUModelRunner):
        return
    inherited = CPUModelRunner.initialize_kv_cache_tensors

    def initialize_kv_cache_tensors(runner: Any, *arguments: Any, **named: Any) -> Any:
        caches = inherited(runner, *arguments, **named)
        # Layers share buffers, and some have the whole of one.
        buffers = {cache.untyped_storage().data_ptr(): cache for cache in caches.values()}
        for cache in buffers.values():
            whole = cache.new_empty(0, dtype=torch.uint8)
            whole.set_(cache.untyped_storage()).zero_()
        return caches

    CPUModelRunner.initialize_kv_cache_tensors = initialize_kv_cache_tensors


_DISABLE = "TORCHDYNAMO_DISABLE"


def compile_only_models() -> None:
    """Let models be compiled where torch's compiler is off otherwise (processes.py says why). Safe to call twice."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper

    if "hearth_inherited" in vars(Wrapper):
        return
    inherited = Wrapper.hearth_inherited = Wrapper.__init__

    def __init__(wrapper: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807  # takes its place
        before = os.environ.pop(_DISABLE, None)  # torch looks at it when a function is handed to its compiler
        try:
            inherited(wrapper, *arguments, **named)
        finally:
            if before is not None:
                os.environ[_DISABLE] = before

    Wrapper.__init__ = __init__


def load_what_was_compiled() -> None:
    """Mend vLLM 0.32, which cannot load code for a CPU: it asks for a method that only code for a GPU has.

    Without it each start compiles again (10 s and more). Safe to call twice.
    """
    import torch

    if getattr(torch.compiler.load_compiled_function, "of_hearth", False):
        return
    inherited = torch.compiler.load_compiled_function

    def load_compiled_function(*arguments: Any, **named: Any) -> Any:
        loaded = inherited(*arguments, **named)
        compiled = loaded._artifacts.compiled_fn  # noqa: SLF001  # as vLLM does
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _config: None  # it is loaded whole
        return loaded

    load_compiled_function.of_hearth = True  # type: ignore[attr-defined]
    torch.compiler.load_compiled_function = load_compiled_function


def spare_searches() -> None:
    """Have `KVCacheManager` answer at once where there is nothing to find, take or keep. Safe to call twice."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    if not hasattr(KVCacheManager, "hearth_inherited"):
        KVCacheManager.hearth_inherited = KVCacheManager.allocate_slots
        KVCacheManager.allocate_slots = _short(KVCacheManager.allocate_slots)


def _short(allocate_slots: Any) -> Any:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    def fits(manager: Any, request: Any) -> bool:
        """Whether one more token goes into the last block, and those that are full then are kept for others already.

        The rule of the latter is that of vLLM's `cache_blocks`.
        """
        groups = manager.coordinator.single_type_managers
        if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
            return False
        (blocks,), name, tokens = groups, request.request_id, request.num_computed_tokens + 1
        size: int = blocks.block_size
        return bool(
            size == blocks.block_pool.hash_block_size
            and tokens <= len(blocks.req_to_blocks[name]) * size
            and (not blocks.enable_caching or tokens // size <= blocks.num_cached_block.get(name, 0))
        )

    def short(
        manager: Any, request: Any, num_new_tokens: int, *rest: Any, num_lookahead_tokens: int = 0, **named: Any
    ) -> Any:
        # Of all that the call can be about, this is one more token, no guesses beyond it, and nothing of a new request.
        if num_new_tokens == 1 and not (num_lookahead_tokens or rest or named) and fits(manager, request):
            return manager.empty_kv_cache_blocks
        return allocate_slots(
            manager, request, num_new_tokens, *rest, num_lookahead_tokens=num_lookahead_tokens, **named
        )

    return short


# No `from __future__ import annotations`: vLLM reads the types of what it is given.


_PROVIDER = "hearth_cpu"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_WIDTH = 32  # the most numbers a kernel takes at once; rows must be whole multiples of what it takes


def priority() -> dict[str, list[str]]:
    """Return vLLM's engine argument `ir_op_priority` that takes them. Where one does not fit, vLLM goes on as ever."""
    return {"rms_norm": [_PROVIDER], "fused_add_rms_norm": [_PROVIDER]}


def register_kernels() -> None:
    """Let vLLM know of them, in each process that reads its configuration. Safe to call twice."""
    from vllm import ir
    from vllm.platforms import current_platform

    if _PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    there = all(hasattr(torch.ops._C, name) for name in priority())  # noqa: SLF001  # vLLM's name for its kernels
    ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_fits, supported=there)(_rms_norm)
    added = ir.ops.fused_add_rms_norm
    added.register_impl(_PROVIDER, supports_args=_fits_added, supported=there, inplace=True)(_fused_add_rms_norm)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:  # noqa: ARG001
    rows = x.contiguous()  # heads cut out of one projection lie apart, and the kernel does not look
    output = torch.empty_like(rows)
    torch.ops._C.rms_norm(output, rows, weight, epsilon)  # noqa: SLF001
    return output


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:  # noqa: ARG001
    if variance_size is not None or x.shape[-1] % _WIDTH or x.dtype not in _DTYPES:
        return False
    return weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous())


def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)  # noqa: SLF001
    return x, x_residual


def _fits_added(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _fits(x, weight, epsilon, variance_size)

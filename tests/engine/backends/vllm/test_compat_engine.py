"""A model is loaded and answers where vLLM no longer has the names that our optional patches take."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import renamed_vllm

from engine.backends.vllm.compat import NAMES

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[4]
# One of each optional patch's, called so nowhere else: a patch is left out whole when any of its names is gone.
RENAMED = {
    "end": "engine_manager",
    "death": "engine_dead",
    "grammar check": "structured_outputs_config",
    "tool parsers": "engine_based_streaming",
    "processes": "get_mp_context",
    "settings": "enable_envs_cache",
    "grammar threads": "StructuredOutputManager",
    "dumps": "dump_engine_exception",
    "newcomers": "_preempt_request",
    "phases": "compile_or_warm_up_model",
    "shared steps": "is_prefill_chunk",
    "interactive first": "remove_requests",
    "seeds": "discard_request_mask",
    "cache at start": "initialize_kv_cache_tensors",
    "compile models only": "TorchCompileWithNoGuardsWrapper",
    "metrics": "_histogram_cls",
    "latencies": "inter_token_latencies_iter",
    "cpu kernels": "ir_op_priority",
    "text prompts": "resolve_chat_template_kwargs",
    "text steps": "track_weight_version",
    "fresh folders": "cached_resolve_tokenizer_args",
    "kv groups": "get_kv_cache_group_metadata",
    "exact values": "_coerce_dict",
    "marks in texts": "_extract_tool_call_jsons",
}
# Of torch and Python, which are not renamed here, and of a GPU's engine.
OTHERS = {"amx", "flashinfer", "fork server", "load compiled code"}
# Said when a process dies, where there are metrics, by a model of one family, or where tools are offered: not by an
# answer without all of these.
SILENT = {"death", "exact values", "latencies", "marks in texts"}


def ask(folder: Path, names: list[str]) -> tuple[dict[str, object], list[str]]:
    """Run chat_once.py on a vLLM without these names; return what it answered, and the patches that were left out."""
    renamed_vllm.make(folder, names)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("chat_once.py"))],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # vLLM's log is there, too
    return json.loads(line), re.findall(r"Left out with this version of vLLM: ([a-z ]+?) \(", done.stderr)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What is answered with all names in place."""
    said, left_out = ask(tmp_path_factory.mktemp("usual"), ["no_such_name"])
    assert left_out == []
    return said


def test_every_optional_patch_is_tried() -> None:
    assert RENAMED.keys() | OTHERS == {each.patch for each in NAMES if each.kind == "optional"}


def test_a_vllm_without_any_name_of_our_optional_patches_answers_the_same(
    tmp_path: Path, usual: dict[str, object]
) -> None:
    said, left_out = ask(tmp_path, list(RENAMED.values()))
    assert said == usual
    assert set(left_out) == RENAMED.keys() - SILENT


@pytest.mark.rounds
@pytest.mark.parametrize("patch", sorted(RENAMED))
def test_a_vllm_without_one_of_these_names_answers_the_same(
    tmp_path: Path, usual: dict[str, object], patch: str
) -> None:
    said, left_out = ask(tmp_path, [RENAMED[patch]])
    assert said == usual
    assert set(left_out) <= {each.patch for each in NAMES if RENAMED[patch] in each.name}

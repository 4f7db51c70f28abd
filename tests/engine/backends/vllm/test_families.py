"""Real model families on the CPU engine: tiny models of their architectures, loaded and asked through our own code."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_parts import shipped
from test_kv_blocks import CONFIGS, SHIPPED

from engine.config import AuxiliaryModelSpec, ChatModelSpec, Config
from engine.demo import weights_dir

FOLDER = Path(__file__).parent
# What pooled_once.py loads, and what the small models are that no family above is for, by their repositories.
POOLED = {"Qwen3ForCausalLM", "XLMRobertaForSequenceClassification"}
OTHERS = {
    "qwen3-embedding-0.6b": "Qwen3ForCausalLM",
    "bge-reranker-v2-m3": "XLMRobertaForSequenceClassification",
    "bge-reranker-v2-m3-on-cpu": "XLMRobertaForSequenceClassification",
    "whisper-large-v3-turbo": "WhisperForConditionalGeneration",
    "whisper-small": "WhisperForConditionalGeneration",
}
NAMES = ("qwen3", "qwen3_5", "qwen3_5_moe", "gpt_oss", "llama", "gemma3", "mistral")


def loaded_architectures() -> set[str]:
    """The first argument of each `Family(...)` that `NAMES` has loaded, read without importing torch."""
    tree = ast.parse((FOLDER / "family_models.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Family"]
    (families,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["FAMILIES"]
    ]
    assert isinstance(families, ast.Dict)
    keys = [ast.literal_eval(key) for key in families.keys if key is not None]
    assert sorted(keys) == sorted(NAMES), "each family is loaded"
    return {ast.literal_eval(call.args[0]) for call in calls}


def _run(program: str, *arguments: str | Path) -> dict[str, Any]:
    """Run a program of this folder, and return what it has printed last."""
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_SYSTEM_START_DATE": "2026-11-23"}  # it is part of gpt-oss' prompts
    ended = subprocess.run(
        [sys.executable, str(FOLDER / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def unloaded(config: Config) -> set[str]:
    """Return the variants on vLLM whose architecture no test of this file, and no demo, loads."""
    chat, others = (
        [variant.id for spec in config.models.values() if isinstance(spec, kind) for variant in spec.variants]
        for kind in (ChatModelSpec, AuxiliaryModelSpec)
    )
    shapes = {name: CONFIGS.get(SHIPPED.get(name, ""), {}).get("architectures") for name in chat}
    shapes |= {name: [OTHERS[name]] if name in OTHERS else None for name in others}
    demo = json.loads((weights_dir("transcription") / "config.json").read_text())["architectures"]
    loaded = loaded_architectures() | POOLED | set(demo)
    return {name for name, architectures in shapes.items() if not architectures or not set(architectures) <= loaded}


def test_no_variant_is_shipped_whose_architecture_is_not_loaded_here():
    assert unloaded(shipped()) == set()


def test_a_variant_of_an_architecture_that_nobody_loaded_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CONFIGS, "gpt-oss-20b", {"architectures": ["NewFamilyForCausalLM"]})
    monkeypatch.delitem(SHIPPED, "qwen3-1.7b")
    monkeypatch.setitem(OTHERS, "whisper-small", "NewHearing")
    monkeypatch.delitem(OTHERS, "bge-reranker-v2-m3")
    assert unloaded(shipped()) == {"gpt-oss-20b", "qwen3-1.7b", "whisper-small", "bge-reranker-v2-m3"}


@pytest.mark.engine
def test_vectors_and_scores_of_the_shipped_architectures_are_those_of_transformers(tmp_path: Path):
    said = _run("pooled_once.py", tmp_path)
    assert "was trained to rerank" in said["errors"].pop("unlike-a-chat")
    assert "has no token no" in said["errors"].pop("without-that-token")
    assert said["errors"] == {}
    assert said["vectors"] < 1e-5
    assert said["scores"] < 1e-4
    assert said["judges"] < 1e-4
    assert said["judges-by-one"] < 1e-4


@pytest.fixture(scope="module", params=NAMES)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    found = _run("family_once.py", request.param, folder)
    assert found["error"] is None, found["error"]
    return request.param, found


@pytest.mark.engine
@pytest.mark.rounds
@pytest.mark.timeout(1500)  # trained first: a minute on a machine that does nothing else
class TestFamily:
    def test_it_answers_as_it_was_trained_streamed_and_whole(self, said: tuple[str, dict[str, Any]]):
        from family_models import FAMILIES

        family = FAMILIES[said[0]]
        for one, (whole, streamed) in zip(family.conversations, said[1]["answers"], strict=True):
            assert whole == streamed, one
            # vLLM leaves the line ends between thought and answer to the answer
            assert whole["content"].lstrip("\n") == one.content
            assert [(name, json.loads(arguments)) for name, arguments in whole["calls"]] == [
                ("get_weather", {"city": city}) for city in one.cities
            ]
            assert whole["ended"] == ("tool_calls" if one.cities else "stop")
            assert whole["reasoning"].strip() == (one.thought if family.thinks else "")
            if family.thinks and one.thinking:
                assert 0 < whole["reasoning_tokens"] < whole["tokens"]
            else:
                assert not whole["reasoning_tokens"]

    def test_it_thinks_before_an_answer_in_json(self, said: tuple[str, dict[str, Any]]):
        from family_models import FAMILIES

        family, answer = FAMILIES[said[0]], said[1]["json"]
        assert json.loads(answer["content"]) == {"greeting": "hello"}
        assert answer["reasoning"].strip() == (family.conversations[0].thought if family.thinks else "")

    def test_it_has_what_is_claimed(self, said: tuple[str, dict[str, Any]]):
        from family_models import FAMILIES

        family, found = FAMILIES[said[0]], set(said[1]["capabilities"])
        assert ("function_calling" in found, "vision" in found) == (family.calls, family.sees)

    def test_forced_arguments_are_held_to_their_schema(self, said: tuple[str, dict[str, Any]]):
        for answer in said[1].get("forced", []):
            ((name, arguments),) = answer["calls"][:1]
            given = json.loads(arguments)
            assert (name, set(given)) == ("forecast", {"city", "days"})
            assert given["city"] in {"Adama", "Mekelle"}
            assert given["days"] in {1, 2, 3}

    def test_a_token_costs_the_same_after_8000_of_them(
        self, said: tuple[str, dict[str, Any]], record_property: Callable[[str, object], None]
    ):
        short, long = said[1]["token_seconds"]
        record_property("milliseconds of a token of 250 and of 8,000", (round(short * 1000, 3), round(long * 1000, 3)))
        assert long < 2 * short

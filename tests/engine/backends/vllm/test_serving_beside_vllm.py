"""Our serving asks vLLM's core for the same as vLLM's own serving classes would, and answers the same."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

RENDERED_HERE = {
    *("plain", "greedy", "greedy again, longer", "no limit", "seeded", "seeded otherwise", "biased", "stopped"),
    *("penalties", "nucleus", "past its end", "salted", "batch", "conversation", "two", "logprobs"),
}
OTHERS = {"header", "named", "many", "parts", "format", "called", "told later", "continued"}


@pytest.fixture(scope="module")
def lines() -> dict[str, Any]:
    """What serving_beside_vllm.py prints, by name."""
    program = [sys.executable, str(Path(__file__).with_name("serving_beside_vllm.py"))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM's log is there, too
    return {line["name"]: line for line in lines}


def test_prompts_of_plain_conversations_alone_are_rendered_here(lines: dict[str, Any]) -> None:
    assert {name for name, line in lines.items() if line.get("taken")} == RENDERED_HERE


@pytest.mark.parametrize("name", sorted(RENDERED_HERE | OTHERS))
def test_the_core_is_asked_for_the_same_and_the_answer_is_the_same(lines: dict[str, Any], name: str) -> None:
    ours, vllms = lines[name]["ours"], lines[name]["vllm"]
    assert len(ours["core"]) >= 3
    assert ours["core"] == vllms["core"]
    if vllms["said"]:
        assert ours["said"] == vllms["said"]


def test_a_client_that_leaves_is_charged_what_was_made_for_it(lines: dict[str, Any]) -> None:
    fetched, made, *charged = lines["early"]["left"]
    assert len(charged) == 1
    assert fetched < made <= charged[0] < 20_000


def test_what_a_taker_raises_ends_its_request_in_vllm_as_well(lines: dict[str, Any]) -> None:
    assert lines["early"]["refused"] == ["GenerationError", 0]


def test_an_error_in_vllms_loop_over_outputs_restarts_the_model(lines: dict[str, Any]) -> None:
    became, found = lines["early"]["lost"]
    assert became in {"GenerationError", "EngineDiedError"}, "by which is seen first"
    assert found == "length"


def test_requests_that_differ_in_one_thing_are_not_taken_for_each_other(lines: dict[str, Any]) -> None:
    names = RENDERED_HERE - {"batch"}  # which differs in its priority alone, and that is the admission's
    assert len({json.dumps(lines[name]["ours"]["core"]) for name in names}) == len(names)

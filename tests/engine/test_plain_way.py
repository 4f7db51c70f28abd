"""The short way of plain conversations leads to the same request to vLLM's core, and to the same answer, as the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

PLAIN = {
    *("plain", "greedy", "greedy again, longer", "no limit", "seeded", "seeded otherwise", "biased", "stopped"),
    *("penalties", "nucleus", "past its end", "salted", "batch", "conversation"),
}
OTHERS = {"header", "named", "many", "parts", "two", "logprobs", "format", "continued"}


@pytest.fixture(scope="module")
def lines() -> dict[str, Any]:
    """What two_ways.py prints, by name."""
    program = [sys.executable, str(Path(__file__).with_name("two_ways.py"))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # vLLM's log is there, too
    return {line["name"]: line for line in lines}


@pytest.fixture
def both(lines: dict[str, Any]) -> dict[str, Any]:
    """Each request of two_ways.py by its name."""
    return {name: line for name, line in lines.items() if name != "engine"}


def test_the_short_way_is_taken_by_plain_conversations_alone(both: dict[str, Any]) -> None:
    assert {name for name, line in both.items() if line["taken"]} == PLAIN
    assert both.keys() - PLAIN == OTHERS


@pytest.mark.parametrize("name", sorted(PLAIN | OTHERS))
def test_both_ways_ask_the_core_for_the_same_and_answer_the_same(both: dict[str, Any], name: str) -> None:
    short, long = both[name]["short"], both[name]["long"]
    assert short["core"] == long["core"]
    assert len(short["core"]) >= 2
    assert short["said"] == long["said"]
    assert not long["at_once"]
    if name not in PLAIN:
        assert not short["at_once"]


def test_steps_of_a_long_plain_answer_are_taken_at_once(both: dict[str, Any]) -> None:
    assert both["past its end"]["short"]["at_once"]


def test_tokens_in_the_middle_of_a_plain_stream_pass_vllms_loop_by(lines: dict[str, Any]) -> None:
    assert lines["engine"]["outputs"] != "OutputProcessor"


def test_a_client_that_leaves_is_charged_what_was_made_for_it(lines: dict[str, Any]) -> None:
    fetched, made, *charged = lines["engine"]["left"]
    assert len(charged) == 1
    assert fetched < made <= charged[0] < 500


def test_what_a_taker_raises_ends_its_request_in_vllm_as_well(lines: dict[str, Any]) -> None:
    assert lines["engine"]["refused"] == ["GenerationError", 0]


def test_an_error_in_vllms_loop_over_outputs_restarts_the_model(lines: dict[str, Any]) -> None:
    became, found = lines["engine"]["lost"]
    assert became
    assert found == "length"


def test_requests_that_differ_in_one_thing_are_not_taken_for_each_other(both: dict[str, Any]) -> None:
    sent = {json.dumps(both[name]["short"]["core"]) for name in PLAIN}
    assert len(sent) == len(PLAIN)

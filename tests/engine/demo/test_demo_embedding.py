"""The demo embedding model and the demo reranker find texts by questions that they were not taught."""

import re

import pytest
from demo_models.build import MADE_OF
from demo_models.embedding.lessons import Pairs, texts
from manifest_parts import problems

from engine.demo import weights_dir

NAMES = ["embedding", "rerank"]


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_fit_the_recipe_that_is_in_the_repository(name: str):
    assert name in MADE_OF
    assert problems(name) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_small_and_holds_no_code(name: str):
    files = [path for path in weights_dir(name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 2 * 2**20
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_what_tests_ask_is_not_taught():
    assert len(texts()) >= 40
    taught = {question for question, _ in Pairs(7).taught}
    assert not taught & {one.held_out for one in texts()}
    assert len({one.text for one in texts()}) == len(texts())


def test_the_same_seed_draws_the_same_pairs():
    drawn = Pairs(3).draw(64)
    assert drawn == Pairs(3).draw(64)
    assert len({text for _, text in drawn[:32]}) == 32  # a question has one right text among them
    assert all(re.search(r"\w", question) for question, _ in drawn)

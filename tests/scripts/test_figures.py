"""What a script makes in docs/ is what today's plans, states and figures say: pictures, and the tables of gpu.md."""

from xml.etree import ElementTree as ET

import pytest
from pages import figures
from serving import ROOT
from test_golden_plans import SHAPES

from engine.config import load_config
from engine.pool.model_state import NEXT

PICTURES = figures.pictures()
AGAIN = "run .venv/bin/python scripts/pages/figures.py"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_the_script_draws_it(name: str):
    assert (ROOT / "docs" / name).read_text() == PICTURES[name], AGAIN
    ET.fromstring(PICTURES[name])  # noqa: S314  # our own files


def test_the_states_of_a_model_have_the_arrows_that_the_pool_allows():
    assert figures.EDGES.keys() == {(old, new) for old, after in NEXT.items() for new in after if new != old}


def test_the_tables_of_gpu_md_are_what_the_plans_are_now():
    text = figures.PAGE.read_text()
    config = load_config(ROOT / "models.yaml")
    assert figures.page(text, config) == text, AGAIN
    assert figures.table(config, "quality") in text


def test_each_golden_plan_has_its_row():
    assert set(figures.MACHINES) | {"cpu"} == set(SHAPES)

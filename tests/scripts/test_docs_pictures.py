"""The pictures of docs/ that a script draws are those of today's plan, states and figures."""

from xml.etree import ElementTree as ET

import pytest
from pages.pictures import EDGES, pictures
from serving import ROOT

from engine.pool.model_state import NEXT

PICTURES = pictures()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_the_script_draws_it(name: str):
    assert (ROOT / "docs" / name).read_text() == PICTURES[name], "run .venv/bin/python scripts/pages/pictures.py"
    ET.fromstring(PICTURES[name])  # noqa: S314  # our own files


def test_the_states_of_a_model_have_the_arrows_that_the_pool_allows():
    assert EDGES.keys() == {(old, new) for old, after in NEXT.items() for new in after if new != old}

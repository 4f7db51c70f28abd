"""A hub with a small model, for every test of weights."""

from collections.abc import Iterator

import pytest
from hub_server import HubServer
from weight_parts import hub_here


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_here() as server:
        yield server

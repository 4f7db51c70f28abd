"""What tests of the engine share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_environment() -> Iterator[None]:
    """`open_service` sets some of its process's; here that is the tests' own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

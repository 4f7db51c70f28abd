"""The environment of processes that are started: variables that are set for a moment, and then as they were."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them while the block runs, for the whole process: one block at a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

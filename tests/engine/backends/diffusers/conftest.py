"""Tiny random pipelines of each family, each saved once. Whoever changes a folder copies it first."""

from collections.abc import Callable
from pathlib import Path

import pytest
from golden_parts import Pipelines
from tiny_pipelines import save


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's pipeline."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save(family, tmp_path_factory.mktemp("pipelines") / family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def pipeline(folders: Callable[[str], Path]) -> Pipelines:
    """Return a family's pipeline, loaded."""
    return Pipelines(folders)

"""Tiny random voices, made once for each test file, and a speech service that speaks them."""

from pathlib import Path

import pytest
from speech_booth import Booth
from tiny_voices import save_vits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vits(tmp_path_factory.mktemp("voices") / "tiny")


@pytest.fixture(scope="module")
def amharic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vits(
        tmp_path_factory.mktemp("voices") / "tiny-am", language="amh", is_uroman=True, speakers=2, rate=22050
    )


@pytest.fixture
def booth(folder: Path) -> Booth:
    return Booth(folder)

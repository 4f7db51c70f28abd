"""Which models a folder is for, and whether the server that runs needs it."""

from pathlib import Path

import pytest

from engine.config import load_config
from server.cli.weights import is_served, serving
from server.observability.status import ServedWith
from server.settings import Settings

YAML = """\
models:
  chatty:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: chatty
    demo: chat
    variants:
      - {folder: good, licence: MIT, weights_gib: 0.3, runs_on: any, repository: a/good}
      - {folder: little, licence: MIT, weights_gib: 0.1, runs_on: any, repository: a/little}
tiers:
  standard: {models: [standard]}
"""


@pytest.mark.parametrize(
    ("served", "folder", "needed"),
    [
        (ServedWith(source="demo", folder="chat"), "good", False),
        (ServedWith(source="variant", folder="little"), "good", False),
        (ServedWith(source="variant", folder="good"), "good", True),
        (ServedWith(source="own", folder="voices"), "voices/amy", True),
        (ServedWith(source="own", folder="mine/large"), "mine", True),
        (ServedWith(source="own", folder="mine2"), "mine", False),
        (None, "good", True),
    ],
)
def test_a_folder_is_needed_by_what_serves_it_and_by_what_awaits_its_turn(served, folder: str, needed: bool):  # noqa: FBT001
    assert is_served(served, folder) == needed


def test_where_no_server_can_be_asked_every_model_that_may_use_a_folder_counts(tmp_path: Path):
    (tmp_path / "models.yaml").write_text(YAML)
    config, settings = load_config(tmp_path / "models.yaml"), Settings(data_dir=tmp_path, weights_dir=tmp_path)
    assert serving(config, settings, "good") == ["chatty"]
    assert serving(config, settings, "unknown") == []

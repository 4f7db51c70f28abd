"""docs/gpu.md says what the plans say; its machines are those of the golden plans."""

from pages import gpu_tables
from test_golden_plans import SHAPES

from engine.config import load_config


def test_the_page_is_what_the_plans_are_now():
    text = gpu_tables.PAGE.read_text()
    config = load_config(gpu_tables.ROOT / "models.yaml")
    assert gpu_tables.page(text, config) == text, "run .venv/bin/python scripts/pages/gpu_tables.py"
    assert gpu_tables.table(config, "quality") in text


def test_each_golden_plan_has_its_row():
    assert set(gpu_tables.MACHINES) | {"cpu"} == set(SHAPES)

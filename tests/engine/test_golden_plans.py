"""What `hearth plan` says of the shipped models on twelve machines, word for word.

After a change that is meant, write them anew and read the difference:

    export HEARTH_WEIGHTS_DIR=/nonexistent HEARTH_DATA_DIR=/nonexistent
    for m in 1x8 1x12 1x16 1x24 1x32 1x48 1x80 1x141 2x24 4x24 8x80 cpu; do
      .venv/bin/hearth plan --gpus $m > tests/engine/golden_plans/$m.txt
    done
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.terminal import HEARTH

GOLDEN = Path(__file__).with_name("golden_plans")
SHAPES = ["1x8", "1x12", "1x16", "1x22.5", "1x24", "1x32", "1x48", "1x80", "1x141", "2x24", "4x24", "8x80", "cpu"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_is_the_one_that_was_agreed_on(shape: str, tmp_path: Path):
    folders = {"HEARTH_WEIGHTS_DIR": str(tmp_path / "w"), "HEARTH_DATA_DIR": str(tmp_path / "d")}
    result = CliRunner().invoke(app, ["plan", "--gpus", shape], env=folders)
    assert result.exit_code == 0, result.output
    assert result.output.replace(f"with: {HEARTH} ", "with: .venv/bin/hearth ") == (GOLDEN / f"{shape}.txt").read_text()


def test_every_golden_plan_is_looked_at():
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(SHAPES)

"""A model with linear attention on the real engine: its KV cache groups are vLLM's own, and requests run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.rounds]


def test_a_model_with_linear_attention_is_let_in_by_its_blocks(tmp_path: Path):
    program = Path(__file__).with_name("hybrid_once.py")
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["tokens"] == [6] * 20
    (block, full), *states = sorted(said["groups"], key=lambda group: group[1] is not None)
    assert full is None
    assert states == [[block, 2]] * 3
    assert said["room"] > 7
    assert said["capabilities"] == ["chat", "reasoning"]  # its parser of thinking sections was taken

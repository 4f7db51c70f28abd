"""The layers are what the design says: who may import whom, and what a start must not load."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "vllm", "transformers", "tokenizers", "safetensors", "numpy", "ray"]

IMPORT = f"""
import sys
import server.app
print(*[name for name in {HEAVY} if name in sys.modules])
"""


def test_importing_the_app_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for package in ("engine", "server"):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False)


def plant(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}\n\ndef _planted() -> None:\n    {line}\n")


def test_the_layers_hold_and_each_breach_of_them_is_noticed(tree: Path):
    clean = lint(tree)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    plant(tree / "engine" / "types.py", "import server.errors")
    plant(tree / "engine" / "stream.py", "import fastapi")
    plant(tree / "server" / "http" / "streaming.py", "import torch")
    plant(tree / "server" / "api" / "key.py", "import server.api.chat")
    breached = lint(tree)
    assert breached.returncode != 0
    for breach in (
        "engine.types -> server.errors",
        "engine.stream -> fastapi",
        "server.http.streaming -> torch",
        "server.api.key -> server.api.chat ",
    ):
        assert breach in breached.stdout

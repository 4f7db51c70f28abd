"""How the server starts: whom it may serve before any key was issued."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from serving import BIN


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104  # what is refused
def test_other_machines_are_not_served_before_there_is_a_key(tmp_path: Path, host: str):
    arguments = ["serve", "--host", host, "--port", "0", "--data-dir", str(tmp_path / "var")]
    ended = subprocess.run([BIN / "hearth", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "There is no API key yet" in ended.stderr
    assert "keys" in ended.stderr
    assert "create" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "hk_" not in ended.stdout + ended.stderr

"""How the server starts: whom it may serve before any key was issued."""

import subprocess
from pathlib import Path

import pytest
from serving import BIN


def _started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`hearth serve`, which is expected to end by itself."""
    command = [BIN / "hearth", "serve", "--port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("where", ["a file", "below a file", "/proc/nowhere"])
def test_a_data_directory_that_cannot_be_used_is_said_in_a_sentence(tmp_path: Path, where: str):
    file = tmp_path / "file"
    file.touch()
    folder = {"a file": str(file), "below a file": str(file / "var")}.get(where, where)
    ended = _started("--data-dir", folder)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"The data directory {folder} cannot be used: ")
    assert "--data-dir" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104  # what is refused
def test_other_machines_are_not_served_before_there_is_a_key(tmp_path: Path, host: str):
    ended = _started("--host", host, "--data-dir", str(tmp_path / "var"))
    assert ended.returncode == 1
    assert "There is no API key yet" in ended.stderr
    assert "keys" in ended.stderr
    assert "create" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "hk_" not in ended.stdout + ended.stderr

"""Cline in the terminal, set up by the line of docs/clients.md."""

import os
import subprocess
from pathlib import Path

import coding_agents
from checks import BASE_URL


def set_up(home: Path, key: str, model: str) -> dict[str, str]:
    subprocess.run(
        [coding_agents.PROGRAMS / "cline", "auth", "-p", "openai-compatible", "-b", BASE_URL, "-k", key, "-m", model],
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    return {}


coding_agents.run("cline", set_up)

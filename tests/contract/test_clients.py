"""Real client libraries, each in its own environment and process, against the real server with the demo model.

What a client has to get right stands in clients/<script>; here it is set up, run, and its report is read.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import ROOT, Key, Server

FOLDER = Path(__file__).parent / "clients"
ENVIRONMENTS = ROOT / ".venv" / "clients"
CHECKS = {"chat", "stream", "tools", "tools_streamed", "structured", "wrong_key", "unknown_model"}
CANNOT_BE_HAD_HERE = 3
OUT_OF_TIME = 124


@dataclass(frozen=True)
class Client:
    """A script in clients/, the environment that it runs in (None: the one of the tests), and what it must have checked."""

    script: str
    environment: str | None
    checks: frozenset[str] = frozenset(CHECKS)

    @property
    def command(self) -> list[str | Path]:
        if self.environment == "node":
            # Reached through a link beside node_modules, which must not be resolved for the packages to be found.
            script = ENVIRONMENTS / "node" / "clients" / self.script
            return ["node", "--preserve-symlinks", "--preserve-symlinks-main", script]
        if self.environment is None:
            return [sys.executable, FOLDER / self.script]
        return [ENVIRONMENTS / self.environment / "bin" / "python", FOLDER / self.script]


CLIENTS = [
    Client("openai_python.py", None),
    Client("openai_node.mjs", "node"),
    Client("ai_sdk.mjs", "node"),
    Client("langchain.py", "langchain"),
    Client("litellm_sdk.py", "litellm"),
    Client("instructor_python.py", "instructor", frozenset(CHECKS - {"chat"})),  # every answer is an object
    Client("pydantic_agent.py", "pydantic-ai"),
    Client("llm_cli.py", "llm"),
]


@functools.cache
def set_up(environment: str) -> tuple[int, str]:
    """Exit status and complaint of scripts/clients, run once per environment; quick when there is nothing to do."""
    done = subprocess.run(
        ["timeout", "240", "scripts/clients", "--quiet", environment],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr.strip() or f"scripts/clients {environment} ended with {done.returncode}"


@pytest.mark.engine
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_works_as_with_the_service_it_was_made_for(
    client: Client, server: Server, admin_key: Key, tmp_path: Path
):
    if client.environment is not None:
        status, complaint = set_up(client.environment)
        if status in {CANNOT_BE_HAD_HERE, OUT_OF_TIME}:
            pytest.skip(complaint)
        assert status == 0, complaint
    # Nothing else: no proxy, and no setting of this person's, has a say.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    environment |= {"BASE_URL": server.base_url, "API_KEY": admin_key.text, "MODEL": "service-plus"}
    done = subprocess.run(
        client.command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    report = [json.loads(line) for line in done.stdout.splitlines()]
    failed = "\n".join(f"{line['check']}: {line['error']}" for line in report if not line["ok"])
    assert not failed, failed
    assert {line["check"] for line in report} == client.checks, done.stderr
    assert done.returncode == 0, done.stderr

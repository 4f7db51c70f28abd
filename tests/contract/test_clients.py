"""Real programs, each in its own environment and process, against the real server with the demo models.

Coding agents talk to a server with a model that plays their whole loop (chain_model.py). What a client has to get right
stands in clients/<script>; here it is set up, run, and its report is read.
"""

import functools
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import chain_model
import pytest
import yaml
from page_parts import CHROMIUM, MISSING
from serving import ROOT, Server
from sound_parts import needs_espeak

FOLDER = Path(__file__).parent / "clients"
ENVIRONMENTS = ROOT / ".venv" / "clients"
DEMO_CHAT = ROOT / "engine" / "demo" / "weights" / "chat"
LOCKS = ROOT / "requirements" / "clients"
CHECKS = frozenset({"chat", "stream", "tools", "tools_streamed", "structured", "wrong_key", "unknown_model"})
CANNOT_BE_HAD_HERE = 3
OUT_OF_TIME = 124


@dataclass(frozen=True)
class Client:
    """A script in clients/, the package that it is about, the environment that it runs in, and what it must have checked.

    Without an environment it is the one of the tests. `server`: the fixture that it talks to.
    """

    script: str
    package: str
    environment: str | None = None
    checks: frozenset[str] = CHECKS
    server: str = "server"

    @property
    def command(self) -> list[str | Path]:
        if self.environment == "node":
            # Reached through a link beside node_modules, which must not be resolved for the packages to be found.
            script = ENVIRONMENTS / "node" / "clients" / self.script
            return ["node", "--preserve-symlinks", "--preserve-symlinks-main", script]
        if self.environment in {None, "agents"}:
            return [sys.executable, FOLDER / self.script]
        return [ENVIRONMENTS / self.environment / "bin" / "python", FOLDER / self.script]

    @property
    def version(self) -> str:
        """The version that runs: what the lock says, since what it says is installed."""
        if self.environment is None:
            return importlib.metadata.version(self.package)
        if self.environment in {"node", "agents"}:
            return json.loads((LOCKS / self.environment / "package.json").read_text())["dependencies"][self.package]
        lines = (LOCKS / f"{self.environment}.lock").read_text().splitlines()
        return next(line for line in lines if line.startswith(f"{self.package}==")).partition("==")[2]


USUAL = [
    Client("openai_python.py", "openai"),
    Client("anthropic_python.py", "anthropic", checks=CHECKS | {"pictures"}),
    Client("openai_node.mjs", "openai", "node"),
    Client("ai_sdk.mjs", "ai", "node"),
    Client("langchain_python.py", "langchain-openai", "langchain", CHECKS | {"agent", "pictures", "embeddings"}),
    Client("openai_agents.py", "openai-agents", "openai-agents", CHECKS | {"pictures"}),
    Client("litellm_sdk.py", "litellm", "litellm"),
    # Every answer of it is an object.
    Client("instructor_python.py", "instructor", "instructor", CHECKS - {"chat"} | {"json_object"}),
    Client("pydantic_agent.py", "pydantic-ai-slim", "pydantic-ai"),
    Client("llm_cli.py", "llm", "llm"),
]
AGENT = frozenset({"stream", "tools_streamed", "wrong_key", "unknown_model"})
PROXY = CHECKS - {"tools_streamed"} | {"pictures", "images_and_speech", "health"}
# They take longer, to install as well: only with ./scripts/test clients.
OTHERS = [
    Client("claude_code.py", "@anthropic-ai/claude-code", "agents", AGENT, server="chain_server"),
    Client("codex_cli.py", "@openai/codex", "agents", AGENT, server="chain_server"),
    Client("opencode_cli.py", "opencode-ai", "agents", AGENT, server="chain_server"),
    Client("continue_cli.py", "@continuedev/cli", "agents", AGENT, server="chain_server"),
    Client("cline_cli.py", "cline", "agents", AGENT, server="chain_server"),
    Client(
        "aider_cli.py",
        "aider-chat",
        "aider",
        frozenset({"chat", "stream", "wrong_key", "unknown_model"}),
        server="chain_server",
    ),
    Client("smolagents_python.py", "smolagents", "smolagents", CHECKS - {"structured"}, server="chain_server"),
    Client("litellm_proxy.py", "litellm", "litellm-proxy", PROXY),
    Client("llama_index_python.py", "llama-index-core", "llama-index", CHECKS | {"pictures", "embeddings", "rerank"}),
    Client("dspy_python.py", "dspy", "dspy", frozenset({"chat", "wrong_key", "unknown_model"})),
    Client("guidellm_cli.py", "guidellm", "guidellm", frozenset({"load", "wrong_key"})),
    Client("lm_eval_cli.py", "lm_eval", "lm-eval", frozenset({"multiple_choice", "wrong_key", "unknown_model"})),
]
_READING = frozenset({"answer_from_texts", "dictation", "edited_picture"})
OPEN_WEBUI = [
    Client("open_webui_browser.py", "open-webui", "open-webui", checks, server)
    for checks, server in ((frozenset({"title_and_tags"}), "server"), (_READING, "reading_server"))
]
ASKED_FOR = ("chat/completions", "embeddings", "rerank", "audio/transcriptions", "images/edits")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
CLIENTS = [*USUAL, *(pytest.param(client, marks=pytest.mark.clients) for client in OTHERS)]
CLIENTS += [pytest.param(one, marks=[pytest.mark.clients, needs_espeak, needs_browser]) for one in OPEN_WEBUI]


@pytest.fixture(scope="module")
def chain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chain")
    chain_model.make(folder / "weights", DEMO_CHAT)
    (folder / "models.yaml").write_text(chain_model.MODELS_YAML)
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as running:
        yield running


@pytest.fixture(scope="module")
def reading_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All demo models, but for the chat model one that reads out what was found for it."""
    folder = tmp_path_factory.mktemp("reader")
    chain_model.make_reader(folder / "weights", DEMO_CHAT)
    described = yaml.safe_load((ROOT / "models.yaml").read_text(encoding="utf-8"))
    described["models"]["service-plus"] = chain_model.READER
    (folder / "models.yaml").write_text(yaml.safe_dump(described), encoding="utf-8")
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as running:
        yield running
        asked = running.access_lines()
        assert {f"/v1/{path}" for path in ASKED_FOR} <= {line.get("route") for line in asked}
        assert [line for line in asked if line["status"] >= 400 and line.get("route") != "/health/ready"] == []


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_works_as_with_the_service_it_was_made_for(
    client: Client, request: pytest.FixtureRequest, tmp_path: Path
):
    if client.environment is not None:
        status, complaint = set_up(client.environment)
        if status in {CANNOT_BE_HAD_HERE, OUT_OF_TIME}:
            pytest.skip(complaint)
        assert status == 0, complaint
    server: Server = request.getfixturevalue(client.server)
    assert server.admin_key is not None
    # Nothing else: no proxy, and no setting of this person's, has a say.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    environment |= {"BASE_URL": server.base_url, "API_KEY": server.admin_key.text, "MODEL": "service-plus"}
    environment |= {"TOKENIZER": str(DEMO_CHAT), "FREE_PORT": str(unused_port()), "CHECKS": " ".join(client.checks)}
    environment |= {"PICTURES": str(ROOT / os.environ.get("PAGE_PICTURES", tmp_path))}
    if client.environment is not None:
        below = "node_modules/.bin" if client.environment == "agents" else "bin"
        environment["PROGRAMS"] = str(ENVIRONMENTS / client.environment / below)
    done = subprocess.run(
        client.command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    report = [json.loads(line) for line in done.stdout.splitlines()]
    failed = "\n".join(f"{line['check']}: {line['error']}" for line in report if not line["ok"])
    assert not failed, failed
    checked = [line["check"] for line in report]
    assert set(checked) == client.checks, done.stderr
    assert done.returncode == 0, done.stderr
    print(f"{client.package} {client.version}: {', '.join(checked)}")  # noqa: T201  shown by ./scripts/test clients

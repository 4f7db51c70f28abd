"""The documentation: the site is built, every link leads somewhere, every command line parses, every example runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from serving import ROOT, Key, Server

from server.cli import _OnDemand, app

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
HEARTH = re.compile(r"(?:^(?:\$ )?|bin/|KEY=\$\()hearth (.*)$")
INLINE = re.compile(r"`hearth ([^`.…]+)`")
SHELL = ("sh", "bash", "console")
# Those of other clients need environments of their own: tests/contract/test_clients.py runs them.
PYTHON_PAGES = ["README.md", "docs/api.md", "docs/batches.md", "docs/messages.md", "docs/responses.md"]
CURL_PAGES = ["README.md", "docs/admin-api.md", "docs/api.md"]
BEFORE = 'from openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="hk_...")\n'
SAID = re.compile(r"^print\(.*\)  # ([A-Z].*\.)$", re.MULTILINE)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, arguments) of each `hearth ...`, without what follows a pipe or comment."""
    for page in PAGES:
        lines = [line for text in blocks(page, *SHELL) for line in text.replace("\\\n", " ").splitlines()]
        for line in [found[1] for line in lines if (found := HEARTH.search(line))] + INLINE.findall(page.read_text()):
            words = shlex.split(re.sub(r"<[\w ]+>", "0123456789ab", line), comments=True)
            end = next((number for number, word in enumerate(words) if word[0] in "|>&;"), len(words))
            yield page.name, words[:end]


def test_the_site_is_built_with_every_page_and_every_link_alive(tmp_path: Path):
    command = [Path(sys.executable).parent / "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stderr
    loaded = [
        address
        for page in tmp_path.rglob("*.html")
        for address in re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
    ]
    assert loaded == []  # nothing of other hosts


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "engine/DESIGN.md"])
def test_links_of_the_pages_outside_the_site_lead_to_files(name: str):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_each_command_line_is_one_that_the_program_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("colleagues.csv", "hearth-backup.db", "FILE", "questions.jsonl"):
        Path(name).touch()
    lines = [(page, words) for page, words in command_lines() if words]
    assert len(lines) > 30
    refused = [f"{page}: hearth {shlex.join(words)}: {why}" for page, words in lines if (why := _refusal(words))]
    assert refused == []


def _refusal(words: list[str]) -> str | None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return None
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
        if isinstance(command, _OnDemand):
            command = command._command()
            if not hasattr(command, "commands"):
                break
    try:
        command.make_context("hearth", list(words))
    except typer.Exit:
        return None
    except Exception as error:  # noqa: BLE001  # typer brings a click of its own: UsageError has no public name
        # Prose names commands without what they need: `hearth restore`.
        return None if type(error).__name__ == "MissingParameter" else f"{type(error).__name__}: {error}"
    return None


@pytest.mark.engine
@pytest.mark.parametrize("name", PYTHON_PAGES)
def test_the_examples_in_python_run(name: str, server: Server, admin_key: Key, tmp_path: Path):
    examples = [text for text in blocks(ROOT / name, "python") if not text.startswith("# Save as")]
    assert examples
    script = "".join([BEFORE, *examples]).replace(ADDRESS, server.root_url).replace("hk_...", admin_key.text)
    environment = os.environ | {"HEARTH_URL": server.root_url, "HEARTH_KEY": admin_key.text}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = [sentence for text in examples for sentence in SAID.findall(text)]
    assert [sentence for sentence in said if sentence not in ran.stdout] == []


@pytest.mark.engine
@pytest.mark.parametrize("name", CURL_PAGES)
def test_the_lines_for_curl_run(name: str, server: Server, admin_key: Key, tmp_path: Path):
    lines = [text.replace(ADDRESS, "$BASE") for text in blocks(ROOT / name, "sh", "bash") if text.startswith("curl")]
    assert lines
    key = admin_key.text
    environment = os.environ | {"BASE": server.root_url, "HEARTH_KEY": key, "ADMIN_KEY": key, "no_proxy": "127.0.0.1"}
    script = 'set -e\ncurl() { command curl --silent --show-error --fail-with-body "$@"; }\n' + "\n".join(lines)
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, timeout=240, check=False
    )
    assert ran.returncode == 0, (ran.stdout[-500:], ran.stderr)

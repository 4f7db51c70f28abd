"""What the client tests rest on, without a server: the demo's promises, the locks, and the script that installs them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_models.promised import fixed_prompts
from demo_models.transcription.sentences import fixed_sentences
from packaging.requirements import Requirement
from serving import ROOT
from test_clients import OPEN_WEBUI, OTHERS, USUAL, Client

FOLDER = Path(__file__).parent / "clients"
LOCKS = ROOT / "requirements" / "clients"
PYTHON_LOCKS = sorted(LOCKS.glob("*.lock"))
NODE_LOCKS = sorted(path.parent for path in LOCKS.glob("*/package.json"))


def test_the_clients_expect_what_the_demo_model_promises():
    demo = json.loads((FOLDER / "demo.json").read_text())
    prompts = {prompt.name: prompt for prompt in fixed_prompts()}
    capital, call, use = (
        prompts[name] for name in ("capital-of-france", "call-weather-paris", "use-weather-paris-18-sunny")
    )
    assert (capital.messages[0]["content"], capital.answer) == (demo["question"], demo["answer"])
    assert call.messages[0]["content"] == demo["tool_question"]
    assert call.tool_calls == [(demo["tool_name"], demo["tool_arguments"])]
    assert (use.messages[-1]["content"], use.answer) == (demo["tool_result"], demo["tool_answer"])
    assert demo["said"] in fixed_sentences()


@pytest.mark.parametrize("lock", PYTHON_LOCKS, ids=lambda path: path.stem)
def test_a_python_lock_names_exact_versions_and_no_address(lock: Path):
    comment, *lines = lock.read_text().splitlines()
    assert comment.startswith("# ")
    assert all(re.fullmatch(r"==[^*]+", str(Requirement(line).specifier)) for line in lines)
    assert not any(Requirement(line).url for line in lines)


@pytest.mark.parametrize("folder", NODE_LOCKS, ids=lambda path: path.name)
def test_a_node_lock_names_exact_versions_and_no_address(folder: Path):
    asked = json.loads((folder / "package.json").read_text())["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in asked} == asked
    assert not [name for name, package in locked.items() if "resolved" in package]
    assert all("integrity" in package for name, package in locked.items() if name)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The project's folder as far as scripts/clients needs it, with nothing installed."""
    shutil.copytree(LOCKS, tmp_path / "requirements" / "clients")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "clients", tmp_path / "scripts" / "clients")
    return tmp_path


def set_up(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "scripts" / "clients", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_package_index_that_does_not_answer_is_told_apart_from_what_is_broken(elsewhere: Path):
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_FIND_LINKS": ""}
    done = set_up(elsewhere, "pydantic-ai", **nowhere, PIP_EXTRA_INDEX_URL="", PIP_RETRIES="1")
    assert (done.returncode, "the package index did not answer" in done.stderr) == (3, True), done
    assert not (elsewhere / ".venv" / "clients" / "pydantic-ai" / "hearth-stamp").exists()


def test_a_lock_that_cannot_be_read_is_broken(elsewhere: Path):
    (elsewhere / "requirements" / "clients" / "llm.lock").write_text("llm == == 1\n")
    done = set_up(elsewhere, "llm")
    assert (done.returncode, "llm: could not be installed" in done.stderr) == (1, True), done


def test_an_unknown_client_is_refused_with_the_known_ones():
    done = set_up(ROOT, "nobody")
    assert done.returncode == 2
    assert all(lock.stem in done.stderr for lock in PYTHON_LOCKS)


@pytest.mark.parametrize("client", [*USUAL, *OTHERS, *OPEN_WEBUI], ids=lambda client: client.script)
def test_the_documentation_names_the_version_that_is_run(client: Client):
    if client.environment is not None:  # the tests' own environment may be newer
        assert f"| {client.version} |" in (ROOT / "docs" / "clients.md").read_text()

"""`hearth serve --real`: from an empty folder to a first answer, and each way in which it does not come to that."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from hub_server import Fault, HubServer
from serving import BIN, Server

from engine.demo import weights_dir

pytestmark = pytest.mark.engine

REPOSITORY = "owner/tiny-chat"
WEIGHTS = "model.safetensors"
YAML = """\
models:
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming]
    weights: service-plus
    demo: chat
    engine: {context_length: 2048}
    variants:
      - {folder: tiny-chat, repository: owner/tiny-chat, licence: Apache-2.0, weights_gib: 0.01, runs_on: any}
tiers:
  standard: {models: [standard]}
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        files = [path for path in weights_dir("chat").iterdir() if path.name != "manifest.json"]
        server.add(REPOSITORY, {path.name: path.read_bytes() for path in files})
        yield server


def environment(hub: HubServer, folder: Path) -> dict[str, str]:
    (folder / "models.yaml").write_text(YAML)
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf"), "HEARTH_MODELS": str(folder / "models.yaml")}


def test_from_nothing_to_a_first_answer_over_a_line_that_is_cut(hub: HubServer, tmp_path: Path):
    hub.faults[WEIGHTS] = [Fault(cut=10_000)]
    server = Server(tmp_path, arguments=["--real", "--yes"], environment=environment(hub, tmp_path))
    with server:
        assert "service-plus: tiny-chat, about 0.0 GiB, licence Apache-2.0, from owner/tiny-chat" in server.log()
        assert "fetched." in server.log()
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": "service-plus", "messages": [question], "temperature": 0}
        answer = httpx2.post(f"{server.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert "tiny-chat" in server.hearth("status")


def _alone(folder: Path, hub: HubServer, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`hearth serve --real`, which is expected to end by itself; nobody sits in front of it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HEARTH_", "HF_"))}
    folders = ["--data-dir", folder / "data", "--weights-dir", folder / "weights"]
    return subprocess.run(
        [BIN / "hearth", "serve", "--real", "--port", "0", *folders, *arguments],
        env=ours | environment(hub, folder) | more,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_nothing_is_fetched_where_nobody_can_be_asked(hub: HubServer, tmp_path: Path):
    ended = _alone(tmp_path, hub)
    assert (ended.returncode, hub.paths) == (1, [])
    assert "licence Apache-2.0" in ended.stdout
    assert ended.stderr == "This is not a terminal: --yes fetches without a question. Nothing was fetched.\n"


@pytest.mark.rounds
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("wrong hash", "arrived twice with another content than its hash says"),
        ("gated", "is gated"),
        ("gone", "or this machine may not see it"),
        ("no hub", "cannot be reached"),
        ("full disk", "That is not enough. Nothing was fetched."),
    ],
)
def test_what_cannot_be_fetched_is_said_and_nothing_half_fetched_is_served(
    hub: HubServer, tmp_path: Path, case: str, said: str
):
    repository, more = hub.repositories[REPOSITORY], {}
    if case == "wrong hash":
        repository.served[WEIGHTS] = bytes(len(repository.files[WEIGHTS]))
    elif case == "gated":
        repository.gated = True
    elif case == "gone":
        hub.repositories.clear()
    elif case == "no hub":
        more["HF_ENDPOINT"] = "http://127.0.0.1:9"
    else:
        (tmp_path / "large.yaml").write_text(YAML.replace("0.01, runs_on", "0.01, download_gib: 60000, runs_on"))
        more["HEARTH_MODELS"] = str(tmp_path / "large.yaml")
    ended = _alone(tmp_path, hub, "--yes", **more)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Base URL" not in ended.stdout
    assert not (tmp_path / "weights" / "tiny-chat").exists()

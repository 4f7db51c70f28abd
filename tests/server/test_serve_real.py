"""`hearth serve --real`: from an empty folder to a first answer, and each way in which it does not come to that."""

import contextlib
import os
import pty
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from hub_server import Fault, HubServer
from serving import BIN, Server
from small_disks import small_disk

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
        answer = httpx2.post(f"{server.base_url}/chat/completions", json=body, headers=headers, timeout=240)
        assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert "tiny-chat" in server.hearth("status")
        # The page's download: once more, in the server that has engines by now.
        shutil.rmtree(tmp_path / "weights" / "tiny-chat")
        address = f"{server.base_url}/admin/weights/pull"
        said = httpx2.post(address, json={"models": ["tiny-chat"]}, headers=headers, timeout=240).text
        assert '"ok":true' in said, said
        assert (tmp_path / "weights" / "tiny-chat" / WEIGHTS).is_file()


def _alone(
    folder: Path, hub: HubServer, *arguments: str, stdin: int = subprocess.DEVNULL, **more: str
) -> subprocess.CompletedProcess[str]:
    """`hearth serve --real`, which is expected to end by itself; nobody sits in front of it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HEARTH_", "HF_"))}
    folders = ["--data-dir", folder / "data", "--weights-dir", folder / "weights"]
    return subprocess.run(
        [BIN / "hearth", "serve", "--real", "--port", "0", *folders, *arguments],
        env=ours | environment(hub, folder) | more,
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=240,
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
        ("wrong hash", "its SHA-256 was wrong both times; it was deleted"),
        ("cut again and again", "the connection breaks again and again"),
        ("gated", "is gated"),
        ("gone", "or this machine may not see it"),
        ("no hub", "cannot be reached"),
        ("full disk", "The disk is too small. Nothing was fetched."),
    ],
)
def test_what_cannot_be_fetched_is_said_and_nothing_half_fetched_is_served(
    hub: HubServer, tmp_path: Path, case: str, said: str
):
    repository, more = hub.repositories[REPOSITORY], {}
    if case == "wrong hash":
        repository.served[WEIGHTS] = bytes(len(repository.files[WEIGHTS]))
    elif case == "cut again and again":
        hub.faults[WEIGHTS] = [Fault(cut=10_000), *[Fault(cut=0)] * 60]
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


def test_who_says_no_gets_nothing_and_hears_how_the_demos_start(hub: HubServer, tmp_path: Path):
    ours, terminal = pty.openpty()
    with ExitStack() as stack:
        for end in (ours, terminal):
            stack.callback(os.close, end)
        os.write(ours, b"n\n")
        ended = _alone(tmp_path, hub, stdin=terminal)
    assert (ended.returncode, hub.paths) == (1, [])
    assert "Fetch them under these licences? [Y/n]" in ended.stdout
    assert ended.stderr.endswith(
        "Nothing was fetched, and the server was not started. ./scripts/serve starts the demos.\n"
    )
    assert not (tmp_path / "weights").exists()


@pytest.mark.rounds
def test_the_same_command_continues_after_a_line_that_broke(hub: HubServer, tmp_path: Path):
    hub.faults[WEIGHTS] = [Fault(cut=10_000), *[Fault(cut=0)] * 60]
    assert _alone(tmp_path, hub, "--yes").returncode == 1
    hub.faults.clear()
    size, before = len(hub.repositories[REPOSITORY].files[WEIGHTS]), hub.served_bytes[WEIGHTS]
    folders = {"HEARTH_DATA_DIR": str(tmp_path / "data"), "HEARTH_WEIGHTS_DIR": str(tmp_path / "weights")}
    with Server(tmp_path, arguments=["--real", "--yes"], environment=environment(hub, tmp_path) | folders) as server:
        assert "fetched." in server.log()
    assert before == 10_000
    assert hub.served_bytes[WEIGHTS] == size, "what was there is not fetched again"


@pytest.mark.rounds
def test_a_disk_that_fills_up_while_files_arrive_is_said(hub: HubServer, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    with small_disk(small, "1200m"):
        hub.faults[WEIGHTS] = [Fault(hold=200_000)]
        waiting = threading.Thread(target=_fill, args=(hub, small))
        waiting.start()
        ended = _alone(tmp_path, hub, "--yes", "--weights-dir", str(small / "weights"))
        waiting.join()
        assert ended.returncode == 1
        assert f"The disk of {small / 'weights'} is full" in ended.stderr
        assert not (small / "weights" / "tiny-chat").exists()


def _fill(hub: HubServer, disk: Path) -> None:
    """Once the file has begun, take all that is left, and let it go on."""
    hub.holding.wait(90)
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 20))
    with (disk / "rest").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(512))
    hub.release.set()
